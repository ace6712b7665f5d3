//! The program as a process, and its arguments and variables.

use std::{
    env,
    io::Write,
    net::SocketAddr,
    ops::{Deref, DerefMut},
    path::Path,
    process::Command,
    time::Duration,
};

use reqwest::{Client, Method, RequestBuilder};
use serde_json::Value;
use sqlx::Postgres;
use tempfile::NamedTempFile;
use tokio::net::TcpStream;

use crate::support::{
    database::{Fresh, TestDatabase},
    eventually,
    http::{Answer, client_builder},
    process::{Process, built},
};

pub const HOLDER: &str = "a-secret-of-holders-2bd8a";
pub const OPERATOR: &str = "a-secret-of-operators-91f";

/// Returns a command for the program, without the variables that it reads.
pub fn program() -> Command {
    clean(Command::new(built("tower-fence")))
}

/// Returns a command for another program, `starter`, which executes the program under test. The
/// tests may run with ignored signals, which `env` restores.
pub fn under(starter: &[&str]) -> Command {
    let mut command = clean(Command::new(starter[0]));
    command.args(&starter[1..]).arg(program().get_program());
    command
}

/// Removes the variables that the program reads.
pub fn clean(mut command: Command) -> Command {
    for (name, _) in env::vars_os() {
        let text = name.to_string_lossy();
        if text.starts_with("TOWER_FENCE_") || text == "DATABASE_URL" {
            command.env_remove(name);
        }
    }
    command
}

/// The output of a command, and its exit status.
#[derive(Debug, Default)]
pub struct Ended {
    pub status: i32,
    pub stdout: String,
    pub stderr: String,
}

impl Ended {
    #[track_caller]
    pub fn is(&self, status: i32) -> &Self {
        assert_eq!(self.status, status, "{self:?}");
        self
    }

    /// Checks that standard error contains this text.
    #[track_caller]
    pub fn says(&self, text: &str) -> &Self {
        assert!(self.stderr.contains(text), "{text:?}: {self:?}");
        self
    }

    pub fn json(&self) -> Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|_| panic!("not JSON: {self:?}"))
    }
}

/// Returns the words of a line, which are separated by blanks.
pub fn words(line: &str) -> Vec<&str> {
    line.split(' ').collect()
}

/// Runs the program to its end.
pub async fn run(arguments: &[&str], variables: &[(&str, &str)]) -> Ended {
    let mut command = program();
    command.args(arguments).envs(variables.iter().copied());
    ended(command).await
}

/// Runs the program to its end, with the URL of a database.
pub async fn run_on(database: &str, arguments: &[&str]) -> Ended {
    run(arguments, &[("TOWER_FENCE_DATABASE_URL", database)]).await
}

pub async fn ended(command: Command) -> Ended {
    end(Process::run(command)).await
}

/// Waits for the end of a process.
pub async fn end(mut process: Process) -> Ended {
    let status = process.exit().await;
    Ended {
        status: status.code().unwrap_or(-1),
        stdout: process.stdout(),
        stderr: process.log(),
    }
}

/// Creates a file with this text, which only its owner can read.
pub fn file(text: &str) -> NamedTempFile {
    let mut file = NamedTempFile::new().unwrap();
    file.write_all(text.as_bytes()).unwrap();
    file
}

pub fn path(file: &NamedTempFile) -> &str {
    name(file.path())
}

pub fn name(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// Returns the options of a server that reads its secrets from these files.
pub fn secret_options<'a>(
    holders: &'a NamedTempFile,
    operators: &'a NamedTempFile,
) -> [&'a str; 4] {
    [
        "--holder-secrets-file",
        path(holders),
        "--operator-secrets-file",
        path(operators),
    ]
}

/// Starts a server with these arguments for the leases of a new database.
pub async fn serving(arguments: &[&str]) -> (Fresh<Postgres>, Served) {
    let db = Postgres::fresh(4).await;
    let server = Served::start(&db.url, arguments).await;
    (db, server)
}

/// Like [`serving`], with the secrets [`HOLDER`] and [`OPERATOR`].
pub async fn serving_with_secrets() -> (Fresh<Postgres>, Served) {
    let (holders, operators) = (file(HOLDER), file(OPERATOR));
    serving(&secret_options(&holders, &operators)).await
}

/// A running `tower-fence serve`, which is killed on drop.
pub struct Served {
    pub url: String,
    pub client: Client,
    secret: Option<String>,
    process: Process,
}

impl Served {
    /// Starts a server for the leases of a database, open to every client on this machine.
    pub async fn start(database: &str, arguments: &[&str]) -> Self {
        Self::start_with(arguments, &[("TOWER_FENCE_DATABASE_URL", database)]).await
    }

    /// Starts a server with these options and variables, on a free port unless they name one.
    pub async fn start_with(arguments: &[&str], variables: &[(&str, &str)]) -> Self {
        let mut command = program();
        command.arg("serve");
        if !arguments.contains(&"--listen") {
            command.args(["--listen", "127.0.0.1:0"]);
        }
        command.args(arguments).envs(variables.iter().copied());
        Self::of(command).await
    }

    /// Starts the server of this command, and waits until it listens.
    pub async fn of(command: Command) -> Self {
        let mut process = Process::run(command);
        process.prints("tower-fence listens on ", 1).await;
        process.prints("\n", 1).await;
        let stdout = process.stdout();
        let (_, url) = stdout.split_once("listens on ").unwrap();
        let client = client_builder().timeout(Duration::from_secs(45));
        Self {
            url: url.trim().to_owned(),
            client: client.build().unwrap(),
            secret: None,
            process,
        }
    }

    /// Sends this secret with each request from now on.
    pub fn with_secret(mut self, secret: &str) -> Self {
        self.secret = Some(secret.to_owned());
        self
    }

    pub fn url(&self, path: &str) -> String {
        format!("{}{path}", self.url)
    }

    pub fn request(&self, method: Method, path: &str) -> RequestBuilder {
        let request = self.client.request(method, self.url(path));
        match &self.secret {
            Some(secret) => request.bearer_auth(secret),
            None => request,
        }
    }

    /// Returns a request of the holder of a lease.
    pub fn of_holder(&self, method: Method, lease: &Value) -> RequestBuilder {
        let [resource, id] = ["resource", "lease_id"].map(|name| lease[name].as_str().unwrap());
        let request = self.request(method, &format!("/locks/{resource}"));
        request.header("Lease-Id", id)
    }

    pub async fn get(&self, path: &str) -> Answer {
        Answer::to(self.request(Method::GET, path)).await
    }

    pub async fn post(&self, path: &str, body: &Value) -> Answer {
        Answer::to(self.request(Method::POST, path).json(body)).await
    }

    /// Waits until the log contains this text. A line about a request may be written after the
    /// response.
    pub async fn logs(&self, text: &str) {
        eventually!(text, self.log().contains(text));
    }

    /// Waits until the log contains this text, and returns the first line with it.
    pub async fn line(&self, text: &str) -> String {
        self.logs(text).await;
        let log = self.log();
        log.lines().find(|line| line.contains(text)).unwrap().into()
    }

    /// Returns the value of a metric, or 0 if nothing has been counted yet.
    pub async fn metric(&self, name: &str) -> i64 {
        let metrics = self.get("/metrics").await.text;
        let mut lines = metrics.lines().filter_map(|line| line.split_once(' '));
        let found = lines.find(|(series, _)| *series == name);
        found.map_or(0, |(_, value)| value.parse().unwrap())
    }

    /// Returns the address of the server.
    pub fn addr(&self) -> SocketAddr {
        let (_, addr) = self.url.split_once("://").unwrap();
        addr.parse().unwrap()
    }

    /// Opens a connection without a request.
    pub async fn connect(&self) -> TcpStream {
        TcpStream::connect(self.addr()).await.unwrap()
    }
}

impl Deref for Served {
    type Target = Process;

    fn deref(&self) -> &Process {
        &self.process
    }
}

impl DerefMut for Served {
    fn deref_mut(&mut self) -> &mut Process {
        &mut self.process
    }
}
