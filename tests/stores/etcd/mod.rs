//! Leases in etcd.

mod calls;
mod endpoints;
mod epochs;
mod faults;
mod history;
mod late;
mod line;
mod list;
mod relocation;
mod secrets;
mod settings;
mod tokens;
