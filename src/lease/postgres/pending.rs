//! A request for a lease that is under way, and its place in line.

use std::sync::Arc;

use futures_util::future::BoxFuture;

use super::{
    functions::{Asked, Functions, Request},
    waiters::{Seat, Waiters},
};
use crate::lease::{LeaseError, background::Background};

/// A request that is under way. Dropped before it is [finished](Self::finish), it leaves the line and gives back
/// what was granted to it, in the database too.
pub(super) struct PendingAcquire {
    functions: Functions,
    request: Arc<Request>,
    /// The call that was sent and not answered. It is seen through, so that nothing of it is left behind.
    call: Option<BoxFuture<'static, Result<Asked, LeaseError>>>,
    pub(super) seat: Option<Seat>,
    /// Whether the database may have something of it.
    asked: bool,
    background: Background,
}

impl PendingAcquire {
    pub(super) fn new(functions: &Functions, request: Request) -> Self {
        Self {
            functions: functions.clone(),
            request: Arc::new(request),
            call: None,
            seat: None,
            asked: false,
            background: Background::here(),
        }
    }

    /// Asks for the lease; with a listener, to wait in line.
    pub(super) async fn ask(
        &mut self,
        listener: Option<i64>,
        max_waiters: usize,
    ) -> Result<Asked, LeaseError> {
        let (functions, request) = (self.functions.clone(), Arc::clone(&self.request));
        let in_line = self.seat.is_some();
        self.asked = true;
        let call = self.call.insert(Box::pin(async move {
            functions
                .ask(&request, in_line, listener, max_waiters)
                .await
        }));
        let asked = call.await;
        self.call = None;
        asked
    }

    /// Joins the waiters of this process. False, and nothing changes, where too many wait.
    pub(super) fn join(&mut self, waiters: &Arc<Waiters>) -> bool {
        if self.seat.is_none() {
            self.seat = waiters.join(&self.request.resource, self.request.ticket);
        }
        self.seat.is_some()
    }

    /// Ends the request without another call: the database has nothing of it that may not stay.
    pub(super) fn finish(mut self) {
        self.asked = false;
    }
}

impl Drop for PendingAcquire {
    fn drop(&mut self) {
        if !self.asked {
            return;
        }
        let (functions, request, call) = (
            self.functions.clone(),
            Arc::clone(&self.request),
            self.call.take(),
        );
        self.background.spawn(async move {
            if let Some(call) = call {
                let _ = call.await;
            }
            // What cannot be taken back ends by its time; of a place in line the process is dead to it.
            let _ = functions.abandon(&request).await;
        });
    }
}
