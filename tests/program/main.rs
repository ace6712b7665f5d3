//! The program `tower-fence`, the OpenAPI document, and programs in other languages.

mod access;
mod check;
mod clients;
mod command;
mod config;
mod connections;
mod container;
mod database_urls;
mod description;
mod drivers;
mod etcd_tls;
mod guide;
mod health;
mod languages;
mod openapi;
mod package;
mod pgbouncer;
pub mod program;
mod redis_secrets;
mod redis_tls;
mod run;
mod run_loss;
mod run_other_user;
mod run_release;
mod run_stop;
mod run_terminal;
mod run_time;
mod secrets;
mod stop;
mod stores;
mod tls;
mod tls_postgres;
mod tools;
mod unfit;
mod unheard;

#[macro_use]
extern crate tower_fence_tests as support;
