//! A Python client that a generator creates from the document.

use super::{file, finish, python_module};
use crate::support::{process::Inventory, variable};

#[tokio::test]
async fn generated_client_acquires_writes_and_is_refused() {
    let service = Inventory::start(&[]).await;
    let folder = tempfile::tempdir().unwrap();
    let mut generator = python_module("openapi_python_client");
    generator
        .args(["generate", "--meta", "none", "--fail-on-warning"])
        .args(["--url", &service.url("/openapi.json")])
        .args(["--config", &file("generated_client.yaml")])
        .arg("--output-path")
        .arg(folder.path().join("inventory"));
    let (generated, said) = finish(generator).await;
    assert!(generated, "{said}");

    let mut script = std::process::Command::new(variable("TEST_OPENAPI_PYTHON"));
    script
        .args([&file("generated_client.py"), &service.url])
        .env("PYTHONPATH", folder.path());
    let (succeeded, said) = finish(script).await;
    assert!(succeeded, "{said}");
    for line in [
        "holder 1 leases sku-1, and is paused",
        "holder 2 has written: the stock is 10",
        "holder 1 is refused: stale-token",
    ] {
        assert!(said.contains(line), "{line:?} is not in {said}");
    }
}
