//! The program `tower-fence`, the OpenAPI document, and programs in other languages.

mod access;
mod command;
mod connections;
mod description;
mod etcd_tls;
mod guide;
mod health;
mod languages;
mod openapi;
mod package;
pub mod program;
mod run;
mod run_loss;
mod secrets;
mod stop;
mod stores;
mod tls;
mod tls_postgres;
mod tools;
mod unheard;

use tower_fence_tests as support;
