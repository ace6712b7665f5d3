//! The program `tower-fence`, as its users start it.

mod access;
mod command;
mod connections;
mod description;
mod guide;
mod health;
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
