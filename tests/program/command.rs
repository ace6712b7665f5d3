//! Commands under a lease, and the notes that they write.

use std::{
    fs,
    path::{Path, PathBuf},
};

use reqwest::Method;
use serde_json::json;
use tempfile::TempDir;

use super::program::{Served, under};
pub use super::program::{end, serving};
use crate::support::{
    eventually,
    process::{Process, stat},
};

/// Starts `tower-fence run` with a shell script, and returns without waiting for its end.
pub fn start(server: &Served, options: &[&str], script: &str) -> Process {
    start_on("sku-1", server, options, script)
}

pub fn start_on(resource: &str, server: &Served, options: &[&str], script: &str) -> Process {
    start_at(&server.url, resource, options, script)
}

/// Like [`start_on`], with the URL of a server or a proxy.
pub fn start_at(url: &str, resource: &str, options: &[&str], script: &str) -> Process {
    start_under(&["env", "--default-signal"], url, resource, options, script)
}

/// Like [`start_at`], but through the program `starter`, which executes the command.
pub fn start_under(
    starter: &[&str],
    url: &str,
    resource: &str,
    options: &[&str],
    script: &str,
) -> Process {
    let mut command = under(starter);
    command
        .env("TOWER_FENCE_URL", url)
        .args(["run", "--resource", resource])
        .args(options)
        .args(["--", "sh", "-c", script]);
    Process::run(command)
}

pub async fn held(server: &Served) -> bool {
    server.get("/locks/sku-1").await.json()["held"] == true
}

/// Waits until this number of requests wait in the queue.
pub async fn are_waiting(server: &Served, count: u64) {
    eventually!(
        "the requests wait",
        server.get("/locks/sku-1").await.json()["waiters"] == count
    );
}

pub async fn break_lease(server: &Served) {
    let broken = server.request(Method::POST, "/locks/sku-1/break");
    assert_eq!(broken.send().await.unwrap().status(), 204);
}

/// Waits until the lease is granted to another client, because it has expired.
pub async fn expires(server: &Served) {
    eventually("another client has the lease", async || {
        let body = json!({"ttl_ms": 600_000});
        server.post("/locks/sku-1", &body).await.status == 201
    })
    .await;
}

/// Files in which a script records its steps, even if its output is not read.
pub struct Notes(TempDir);

impl Notes {
    pub fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Returns a script in which `NOTES` is this folder.
    pub fn script(&self, text: &str) -> String {
        text.replace("NOTES", self.0.path().to_str().unwrap())
    }

    pub fn text(&self, name: &str) -> String {
        fs::read_to_string(self.path(name)).unwrap_or_default()
    }

    /// Writes the note that a script waits for.
    pub fn note(&self, name: &str) {
        fs::write(self.path(name), "").unwrap();
    }

    pub async fn has(&self, name: &str) -> String {
        eventually!("the note is written", self.text(name).ends_with('\n'));
        self.text(name).trim().to_owned()
    }
}

pub fn lives(pid: &str) -> bool {
    !matches!(state(pid), None | Some('Z' | 'X'))
}

/// Returns the state of a process, as `ps` shows it.
pub fn state(pid: &str) -> Option<char> {
    stat(Path::new(&format!("/proc/{pid}")))?[0].chars().next()
}
