//! Leases in Redis when servers, connections and data are lost.

mod clients;
mod cluster;
mod contact;
mod deposed;
mod history;
mod line_loss;
mod memory;
