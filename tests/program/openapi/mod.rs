//! The OpenAPI documents, compared with the service that they describe.

mod document;
mod generated_client;
mod schemathesis;
mod schemathesis_server;

use std::process::Command;

use crate::support::{process::Process, repository, variable};

/// Returns the path of a file in this folder.
fn file(name: &str) -> String {
    let folder = repository().join("tests/program/openapi");
    folder.join(name).to_str().unwrap().to_owned()
}

/// Returns a command for a module of the Python environment that `tests/run` creates.
fn python_module(name: &str) -> Command {
    let mut command = Command::new(variable("TEST_OPENAPI_PYTHON"));
    command.args(["-m", name]);
    command
}

/// Runs a program to its end in a temporary folder, which is deleted afterwards with any files that
/// the program creates. Returns whether it succeeded, and its output.
async fn finish(command: Command) -> (bool, String) {
    let folder = tempfile::tempdir().unwrap();
    let mut process = Process::run_in(folder.path(), command);
    let status = process.ends().await;
    let said = format!("{}{}", process.stdout(), process.log());
    (status.success(), said)
}
