//! The OpenAPI documents, beside the service that they describe.

mod document;
mod generated_client;
mod schemathesis;
mod schemathesis_server;

use std::process::Command;

use crate::support::{process::Process, repository, variable};

/// A file of this folder.
fn file(name: &str) -> String {
    let folder = repository().join("tests/program/openapi");
    folder.join(name).to_str().unwrap().to_owned()
}

/// A module of the Python that `tests/run` makes.
fn python_module(name: &str) -> Command {
    let mut command = Command::new(variable("TEST_OPENAPI_PYTHON"));
    command.args(["-m", name]);
    command
}

/// Runs a program to its end, and gives whether it succeeded and what it said. What it leaves where it runs, as the cache of
/// schemathesis, is gone then.
async fn finish(command: Command) -> (bool, String) {
    let folder = tempfile::tempdir().unwrap();
    let mut process = Process::run_in(folder.path(), command);
    let status = process.ends().await;
    let said = format!("{}{}", process.stdout(), process.log());
    (status.success(), said)
}
