//! Traces: steps that are drawn from the models in `model`, and executed by the real fence and the
//! real lease stores. After each step, the state and the answer are compared with the model.

mod broken;
mod broken_functions;
mod broken_scripts;
mod call;
mod fence;
mod fence_draw;
mod fence_failover;
mod fence_floors;
mod fence_keys;
mod fence_real;
mod fence_several;
mod lease;
mod lease_announced;
mod lease_call;
mod queue;
mod quorum;
mod quorum_nodes;
mod sessions;
mod walk;

use tower_fence_tests as support;
