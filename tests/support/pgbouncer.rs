//! PgBouncer in transaction mode, in front of a Postgres server.

use std::{
    fs,
    net::SocketAddr,
    os::unix::{fs::chown, process::CommandExt},
    path::Path,
    process::Command,
};

use reqwest::Url;
use tempfile::TempDir;

use super::{ports::free_port, postgres::unprivileged, process::Process};

pub struct PgBouncer {
    process: Process,
    port: u16,
    folder: TempDir,
    url: Url,
}

impl PgBouncer {
    /// Starts PgBouncer in front of the Postgres server of this URL.
    pub async fn start(database: &str) -> Self {
        let settings = [
            "pool_mode = transaction",
            "ignore_startup_parameters = extra_float_digits",
            "server_reset_query = DISCARD ALL",
            "server_reset_query_always = 1",
        ];
        Self::start_with(database, &settings).await
    }

    /// Like [`start`](Self::start), with other pool settings.
    pub async fn start_with(database: &str, settings: &[&str]) -> Self {
        let (port, folder) = (free_port(), tempfile::tempdir().unwrap());
        let mut url = Url::parse(database).unwrap();
        let (host, server_port) = (url.host_str().unwrap(), url.port().unwrap());
        let (user, password) = (url.username(), url.password().unwrap());
        let file = folder.path().join("pgbouncer.ini");
        let settings = format!(
            "[databases]\n* = host={host} port={server_port} user={user} password={password}\n\
             [pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\nunix_socket_dir =\n\
             auth_type = any\nmax_client_conn = 1000\nserver_login_retry = 1\nquery_wait_timeout = 5\n{}\n",
            settings.join("\n")
        );
        fs::write(&file, settings).unwrap();
        if let Some((user, group)) = unprivileged() {
            for path in [folder.path(), &file] {
                chown(path, Some(user), Some(group)).unwrap();
            }
        }
        url.set_port(Some(port)).unwrap();
        let this = Self {
            process: run(folder.path()),
            port,
            folder,
            url,
        };
        this.is_ready().await;
        this
    }

    /// Returns the URL of the database through PgBouncer.
    pub fn url(&self) -> String {
        self.url.to_string()
    }

    pub fn signal(&self, signal: &str) {
        self.process.signal(signal);
    }

    pub async fn restart(&mut self) {
        self.process.kill();
        self.process = run(self.folder.path());
        self.is_ready().await;
    }

    async fn is_ready(&self) {
        let addr: SocketAddr = ([127, 0, 0, 1], self.port).into();
        eventually!(
            "PgBouncer listens",
            tokio::net::TcpStream::connect(addr).await.is_ok()
        );
    }
}

fn run(folder: &Path) -> Process {
    let debian = Path::new("/usr/sbin/pgbouncer");
    let program = if debian.exists() {
        debian
    } else {
        Path::new("pgbouncer")
    };
    let mut command = Command::new(program);
    command.args(["-q", "pgbouncer.ini"]);
    if let Some((user, group)) = unprivileged() {
        command.uid(user).gid(group);
    }
    Process::run_in(folder, command)
}
