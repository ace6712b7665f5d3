//! Attempts of a [`Holder`] to acquire a lease.

use std::{io, time::Duration};

use tokio::time::{Instant, sleep_until};

use super::{holder::Holder, http_error::HttpError, renewal::pauses};
use crate::{
    lease::{Acquire, Lease, LeaseError, LeaseId, Leases, Renew},
    time::after,
    token::Resource,
};

/// Longest wait of one request. The holder splits a longer [`Holder::wait`] into several requests
/// under one lease id.
const LONGEST_WAIT: Duration = Duration::from_secs(30);

/// Duration above which the holder halves a wait that the issuer has refused. If the issuer refuses
/// a wait of at most this duration, the holder polls.
const SHORTEST_WAIT: Duration = Duration::from_millis(500);

/// First pause between attempts after a transient failure of the store or the network. The pauses
/// grow up to [`LONGEST_PAUSE`].
const FIRST_PAUSE: Duration = Duration::from_millis(50);

/// Longest pause between attempts after a transient failure.
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

impl<L: Leases> Holder<L> {
    /// Retries until the store grants a lease with most of its time left, or the wait is over.
    /// Returns the lease, and the time just before its request was sent. Sets `is_sent` unless the
    /// store is known to have received no request.
    pub(super) async fn ask(
        &self,
        resource: &Resource,
        id: &LeaseId,
        is_sent: &mut bool,
    ) -> Result<(Lease, Instant), LeaseError> {
        let deadline = after(self.wait);
        let mut pauses = pauses(FIRST_PAUSE, LONGEST_PAUSE);
        let mut longest_wait = LONGEST_WAIT;
        loop {
            let asked_at = Instant::now();
            let wait = deadline
                .saturating_duration_since(asked_at)
                .min(longest_wait);
            let mut request = Acquire::new(self.ttl)
                .lease_id(id.clone())
                .lock_delay(self.lock_delay)
                .wait(wait);
            if let Some(owner) = &self.owner {
                request = request.owner(owner.clone());
            }
            let error = match self.leases.acquire(resource, request).await {
                Ok(lease) if asked_at.elapsed() < lease.ttl / 3 => return Ok((lease, asked_at)),
                // The response was slow, so the remaining time of the lease is uncertain. A renewal
                // restarts the TTL.
                Ok(_) => {
                    *is_sent = true;
                    let asked_at = Instant::now();
                    let renew = Renew::new(self.ttl);
                    match self.leases.renew(resource, id, renew).await {
                        Ok(lease) if asked_at.elapsed() < lease.ttl => {
                            return Ok((lease, asked_at));
                        }
                        Ok(_) => LeaseError::unavailable(io::Error::from(io::ErrorKind::TimedOut)),
                        Err(error) => error,
                    }
                }
                Err(error) => {
                    *is_sent |= !is_unsent(&error);
                    error
                }
            };
            match &error {
                // The issuer has a lower limit for a single wait.
                LeaseError::Invalid { field, .. } if field == "wait_ms" && !wait.is_zero() => {
                    longest_wait = match wait > SHORTEST_WAIT {
                        true => wait / 2,
                        false => Duration::ZERO,
                    };
                    continue;
                }
                // The request has waited in the queue for its whole time, so the next request
                // follows without a pause.
                LeaseError::Held { .. }
                    if !wait.is_zero()
                        && asked_at.elapsed() >= wait
                        && Instant::now() < deadline =>
                {
                    continue;
                }
                _ => {}
            }
            let may_pass = match &error {
                LeaseError::Unavailable(cause) => {
                    !matches!(cause.downcast_ref(), Some(HttpError::OtherResource { .. }))
                }
                error => matches!(
                    error,
                    LeaseError::Lost { .. }
                        | LeaseError::Held { .. }
                        | LeaseError::TooManyWaiters { .. }
                ),
            };
            if !may_pass || Instant::now() >= deadline {
                return Err(error.not_yet_held());
            }
            let pause = pauses.next().unwrap_or(LONGEST_PAUSE);
            sleep_until(deadline.min(Instant::now() + pause)).await;
        }
    }
}

/// Returns whether the store is known not to have received the request, because no connection was
/// opened.
fn is_unsent(error: &LeaseError) -> bool {
    let LeaseError::Unavailable(cause) = error else {
        return false;
    };
    match cause.downcast_ref() {
        Some(HttpError::Request { source, .. }) => source.is_connect(),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::client::HttpLeases;

    #[tokio::test]
    async fn request_without_a_connection_is_unsent() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let resource = Resource::new("sku-1").unwrap();
        let leases = HttpLeases::new(&url).unwrap();
        let acquire = async || {
            let request = Acquire::new(Duration::from_secs(9));
            leases.acquire(&resource, request).await.unwrap_err()
        };
        // The server closes the first connection after the request.
        let server = tokio::spawn(async move {
            let (mut connection, _) = listener.accept().await.unwrap();
            tokio::io::AsyncReadExt::read(&mut connection, &mut [0; 9])
                .await
                .unwrap();
        });
        assert!(!is_unsent(&acquire().await));
        server.await.unwrap();
        let error = acquire().await;
        assert!(is_unsent(&error), "{error:?}");
    }
}
