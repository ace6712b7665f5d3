//! Leases on a majority of Redis servers that know nothing of each other: Redlock, with fencing
//! tokens.
//!
//! Each node has a token counter for each partition, and a key for each lease that it granted. What
//! a node gave a lease when its key was set is the stamp: history (`master_replid`), incarnation of
//! the counter, serial.
//!
//! 1. One script *takes* the key on all nodes. If there is no key and the counter has an epoch, the
//!    script *seals* a token in it at once: the number that the issuer proposes, if that is above
//!    the counter, and otherwise the next one. The token is granted if a majority has sealed the
//!    same one.
//! 2. Otherwise the token is one above the highest counter of a majority, and a second script seals
//!    it on those nodes: only if the key still has that stamp, and the counter that history and
//!    incarnation.
//! 3. A counter that is missing, or was written in another history (the node was restarted), has no
//!    epoch. If one is needed, it comes from [`Epochs`](tower_fence::epochs::Epochs) then, never
//!    ahead.
//! 4. A counter never goes back, and no script lowers the token of a key.
//! 5. A repetition of a request takes the key again, under a newer attempt. Late scripts of an
//!    older attempt are refused, and late answers count for nothing.
//! 6. A renewal and a release name the token and the attempt that were granted. The issuer that
//!    granted the lease knows them; another one reads them from a majority first.
//! 7. A request that fails ends its keys without a token, and those whose token it has sealed
//!    itself.
//! 8. A node stands alone. One with replicas may be replaced by a server that knows less.
//!
//! There is no queue: a request that waits polls, after random pauses.
//!
//! The [verification](tower_fence::proof#a-quorum-of-redis-nodes) has what happens without each
//! rule.
//!
//! # Example
//!
//! ```no_run
//! # async fn example(pool: sqlx::PgPool) -> Result<(), Box<dyn std::error::Error>> {
//! use axum::Router;
//! use tower_fence::{Fence, issuer};
//! use tower_fence_redlock::QuorumLeasesBuilder;
//!
//! let fence = Fence::new(pool);
//! let nodes = ["redis://a", "redis://b", "redis://c"];
//! let leases = QuorumLeasesBuilder::new(fence.clone()).connect(&nodes).await?;
//!
//! let app: Router = Router::new().nest("/locks", issuer::router(leases.announced_to(fence)));
//! # Ok(())
//! # }
//! ```

mod answer;
mod answers;
mod attempt;
mod backend;
mod builder;
mod choice;
mod end;
mod grant;
mod grants;
mod list;
mod node;
mod nodes;
mod renew;
mod scripts;
mod server;

pub use self::{
    backend::{QuorumBackend, QuorumLeases},
    builder::QuorumLeasesBuilder,
};
