//! Leases in etcd.

mod calls;
mod data_loss;
mod endpoints;
mod epochs;
mod faults;
mod late;
mod list;
mod queue;
mod relocation;
mod secrets;
mod settings;
mod tokens;
