//! Leases in Redis when servers, connections and data are lost.

mod cluster;
mod contact;
mod data_loss;
mod deposed;
mod memory;
mod queue_loss;
