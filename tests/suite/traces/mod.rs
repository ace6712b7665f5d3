//! Steps drawn from the models of `tests/model`, taken by the real fence and the real lease stores: states and answers
//! are compared after each.

mod fence;
mod fence_floors;
mod fence_read;
mod fence_real;
mod lease;
mod lease_announced;
mod quorum;
mod quorum_nodes;
