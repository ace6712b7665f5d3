//! The inventory example as a process of its own.

use std::{
    io::Read,
    path::PathBuf,
    process::{Child, Command, ExitStatus, Stdio},
    time::Duration,
};

use tempfile::NamedTempFile;

pub struct Inventory {
    pub url: String,
    child: Child,
    log: NamedTempFile,
    stdout: NamedTempFile,
}

impl Inventory {
    /// Starts the service on a free port and waits until it listens.
    pub async fn start(variables: &[(&str, &str)]) -> Self {
        let log = NamedTempFile::new().unwrap();
        let stdout = NamedTempFile::new().unwrap();
        let child = Command::new(binary())
            .env_remove("DATABASE_URL")
            .env_remove("REDIS_URL")
            .env_remove("RUST_LOG")
            .env("LISTEN_ADDR", "127.0.0.1:0")
            .envs(variables.iter().copied())
            .stdin(Stdio::null())
            .stdout(stdout.reopen().unwrap())
            .stderr(log.reopen().unwrap())
            .spawn()
            .unwrap();
        let mut service = Self {
            url: String::new(),
            child,
            log,
            stdout,
        };
        for _ in 0..1_000 {
            if let Some(url) = service.greeting() {
                service.url = url;
                return service;
            }
            assert!(
                service.child.try_wait().unwrap().is_none(),
                "{}",
                service.log()
            );
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        panic!("the service does not listen: {}", service.log());
    }

    fn greeting(&self) -> Option<String> {
        let stdout = self.stdout();
        let (_, rest) = stdout.split_once("inventory listens on ")?;
        let (url, _) = rest.split_once('\n')?;
        Some(url.to_owned())
    }

    pub fn url(&self, path: &str) -> String {
        format!("{}{path}", self.url)
    }

    /// What it has printed.
    pub fn stdout(&self) -> String {
        text_of(&self.stdout)
    }

    /// What it has logged.
    pub fn log(&self) -> String {
        text_of(&self.log)
    }

    pub fn signal(&self, signal: &str) {
        let pid = self.child.id().to_string();
        let status = Command::new("kill").args([signal, &pid]).status().unwrap();
        assert!(status.success());
    }

    pub async fn exit(&mut self) -> ExitStatus {
        for _ in 0..2_000 {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("the service did not exit: {}", self.log());
    }
}

impl Drop for Inventory {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn text_of(file: &NamedTempFile) -> String {
    let mut text = String::new();
    file.reopen().unwrap().read_to_string(&mut text).unwrap();
    text
}

/// Beside the test program: `target/PROFILE/deps/suite-…` and `target/PROFILE/examples/inventory`.
fn binary() -> PathBuf {
    let test_program = std::env::current_exe().unwrap();
    let profile = test_program.parent().unwrap().parent().unwrap();
    let binary = profile.join("examples").join("inventory");
    assert!(
        binary.exists(),
        "not built: cargo build --example inventory"
    );
    binary
}
