//! Servers, processes and connections that fail under load, and tests that take a long time.

mod answered;
mod connections;
mod disconnect;
mod failover;
mod outages;
mod outbox;
mod postgres_crash;
mod postgres_durable;
mod postgres_processes;
mod pressure;
mod repeated;
mod restored;
mod rotation;
mod secrets;
mod shortage;
mod unreplicated;
mod wall_clock;

#[macro_use]
extern crate tower_fence_tests as support;
