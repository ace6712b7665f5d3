//! Commands under a lease, and what they note.

use std::{fs, path::PathBuf};

use sqlx::Postgres;
use tempfile::TempDir;

use super::program::{Ended, Served, under};
use crate::support::{
    database::{Fresh, TestDatabase},
    eventually,
    process::Process,
};

pub async fn serving() -> (Fresh<Postgres>, Served) {
    let db = Postgres::fresh(4).await;
    let server = Served::start(&db.url, &[]).await;
    (db, server)
}

/// `tower-fence run` with a shell script, which is started and not waited for.
pub fn start(server: &Served, options: &[&str], script: &str) -> Process {
    start_on("sku-1", server, options, script)
}

pub fn start_on(resource: &str, server: &Served, options: &[&str], script: &str) -> Process {
    let mut command = under(&["env", "--default-signal"]);
    command
        .env("TOWER_FENCE_URL", &server.url)
        .args(["run", "--resource", resource])
        .args(options)
        .args(["--", "sh", "-c", script]);
    Process::run(command)
}

pub async fn end(mut process: Process) -> Ended {
    let status = process.exit().await;
    Ended {
        status: status.code().unwrap_or(-1),
        stdout: process.stdout(),
        stderr: process.log(),
    }
}

pub async fn held(server: &Served) -> bool {
    server.get("/locks/sku-1").await.json()["held"] == true
}

/// Where a script says what it does, even when nobody reads its output.
pub struct Notes(TempDir);

impl Notes {
    pub fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    pub fn text(&self, name: &str) -> String {
        fs::read_to_string(self.path(name)).unwrap_or_default()
    }

    pub async fn has(&self, name: &str) -> String {
        eventually("it is noted", async || self.text(name).ends_with('\n')).await;
        self.text(name).trim().to_owned()
    }
}

pub fn lives(pid: &str) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let state = stat
        .rsplit_once(") ")
        .map(|(_, behind)| behind.chars().next());
    !matches!(state, None | Some(Some('Z' | 'X')))
}
