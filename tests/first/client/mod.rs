//! The holder and its client.

mod guard;
mod holder;
mod http_leases;
mod issued;
mod loss;
