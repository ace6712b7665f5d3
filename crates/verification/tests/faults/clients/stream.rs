//! A client that reads once, and then writes repeatedly: each state is computed from its own last
//! write.

use std::time::{Duration, Instant};

use rand::RngExt;

use super::{Client, PAUSE};

/// The time for which a lease of two seconds is used.
const USED: Duration = Duration::from_millis(1_500);

/// The times at which a stream of writes ends and pauses. A stream continues after its pause, even
/// though another client may have written.
pub(super) struct Stream {
    until: Instant,
    pause_at: Option<Instant>,
}

impl Stream {
    pub(super) fn new(client: &mut Client) -> Self {
        let until = Instant::now() + USED;
        let pauses = client.random.random_bool(0.1);
        let pause_at = pauses.then(|| until - USED.mul_f64(client.random.random()));
        Self { until, pause_at }
    }

    pub(super) async fn goes_on(&mut self, client: &mut Client) -> bool {
        let pauses = self.pause_at.take_if(|at| *at < Instant::now());
        if pauses.is_some() {
            client.pause(PAUSE).await;
            self.until = Instant::now() + USED;
        }
        Instant::now() < self.until && !*client.stop.borrow()
    }
}

impl Client {
    pub(super) async fn stream(&mut self) -> Option<()> {
        let resource = self.choose();
        let (lease, held) = self.acquire(resource, 1).await?;
        let mut state = *self.read(&[&held], self.side.is_fenced).await?.first()?;
        let mut stream = Stream::new(self);
        while stream.goes_on(self).await {
            // A write without an answer may take effect later, so no other write may follow under
            // this token.
            let Some(written) = self.write_again(&held, state).await else {
                break;
            };
            state = written;
        }
        self.release(&lease).await;
        Some(())
    }
}
