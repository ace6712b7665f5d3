//! What is told of an admission: one number for the metrics, and each resource for the console.

use crate::{feed, fence::Claims, metrics};

/// A write was admitted.
pub(super) fn for_write(claims: &Claims) {
    metrics::count_by("tower_fence_admitted_total", "kind", "write");
    tell(claims, false);
}

/// A fenced read was answered.
pub(super) fn for_read(claims: &Claims) {
    metrics::count_by("tower_fence_admitted_total", "kind", "read");
    tell(claims, true);
}

fn tell(claims: &Claims, read: bool) {
    for claim in claims.iter() {
        feed::admitted(&claim.resource, claim.token, read);
    }
}
