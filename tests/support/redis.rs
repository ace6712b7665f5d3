//! Redis: shared servers, and servers that a test can stop and flush.

use std::{net::SocketAddr, path::PathBuf, process::Command};

use redis::{AsyncConnectionConfig, FromRedisValue, RedisResult, aio::MultiplexedConnection};
use sqlx::Sqlite;
use tempfile::TempDir;
use tower_fence::{epochs::Epochs, lease::RedisLeases};

use super::{
    PATIENCE,
    database::{Fresh, TestDatabase},
    eventually,
    ports::free_port,
    process::Process,
};

/// Opens a connection to a server. By default, the client waits only half a second for an answer,
/// and a busy machine may need longer.
pub async fn open(url: &str) -> RedisResult<MultiplexedConnection> {
    let config = AsyncConnectionConfig::new()
        .set_connection_timeout(Some(PATIENCE))
        .set_response_timeout(Some(PATIENCE));
    let client = redis::Client::open(url)?;
    let connection = client.get_multiplexed_async_connection_with_config(&config);
    connection.await
}

/// Connects a store to this server, with the epochs of this database.
pub async fn connect(server: &RedisServer, db: &Fresh<Sqlite>) -> RedisLeases {
    RedisLeases::connect(&server.url(), db.fence())
        .await
        .unwrap()
}

/// Starts a server, and connects a store with the epochs of a new database.
pub async fn with_leases() -> (RedisServer, Fresh<Sqlite>, RedisLeases) {
    let (server, db) = (RedisServer::start(&[]).await, Sqlite::fresh(2).await);
    let leases = connect(&server, &db).await;
    (server, db, leases)
}

/// Returns the URL of the shared server. Each test uses its own key prefix on it, and never flushes
/// it.
pub fn shared_url() -> String {
    super::variable("TEST_REDIS_URL")
}

/// Connects a store to the shared server, with this key prefix.
pub async fn connect_shared(epochs: impl Epochs + 'static, prefix: &str) -> RedisLeases {
    let builder = RedisLeases::builder(epochs).key_prefix(prefix);
    builder.connect(&shared_url()).await.unwrap()
}

/// Returns the URL of the shared cluster, which has one node.
pub fn shared_cluster_url() -> String {
    super::variable("TEST_REDIS_CLUSTER_URL")
}

/// Returns the URLs of three independent shared servers, for a quorum.
pub fn shared_node_urls() -> Vec<String> {
    let urls = super::variable("TEST_REDIS_NODE_URLS");
    urls.split(' ').map(str::to_owned).collect()
}

/// Returns a unique key prefix.
pub fn fresh_prefix() -> String {
    format!("test-{:016x}", rand::random::<u64>())
}

/// Returns the keys of a server that match this pattern.
pub async fn keys(url: &str, pattern: &str) -> Vec<String> {
    let mut connection = open(url).await.unwrap();
    let keys = redis::cmd("KEYS").arg(pattern).take();
    keys.query_async(&mut connection).await.unwrap()
}

/// Deletes the keys of a server that match this pattern.
pub async fn delete_keys(url: &str, pattern: &str) {
    let mut connection = open(url).await.unwrap();
    for key in keys(url, pattern).await {
        let mut delete = redis::cmd("DEL");
        delete.arg(key).exec_async(&mut connection).await.unwrap();
    }
}

/// The key of the token counter in the partition of `sku-1`.
pub const COUNTER: &str = "tower-fence:{110}:clock";
/// The key of the lease of `sku-1`.
pub const LEASE: &str = "tower-fence:{110}:lease:sku-1";

/// A server that only this test uses.
pub struct RedisServer {
    process: Option<Process>,
    port: u16,
    cluster_port: u16,
    folder: TempDir,
    options: Vec<String>,
    variables: Vec<(String, String)>,
}

impl RedisServer {
    /// Starts a server on a free port, with these options.
    pub async fn start(options: &[&str]) -> Self {
        Self::start_with(options, &[]).await
    }

    /// Like [`start`](Self::start), with these environment variables.
    pub async fn start_with(options: &[&str], variables: &[(&str, &str)]) -> Self {
        let owned = |(name, value): &(&str, &str)| ((*name).to_owned(), (*value).to_owned());
        for _ in 0..10 {
            let port = free_port();
            let mut server = Self {
                process: None,
                port,
                cluster_port: free_port(),
                folder: tempfile::tempdir().unwrap(),
                options: options.iter().map(|option| (*option).to_owned()).collect(),
                variables: variables.iter().map(owned).collect(),
            };
            if server.try_start().await {
                return server;
            }
        }
        panic!("redis-server could not be started: use tests/run");
    }

    /// Runs a command of these words. Panics if it fails.
    pub async fn send(&self, command: &str) -> redis::Value {
        self.command(&command.split(' ').collect::<Vec<_>>()).await
    }

    /// Makes this server a replica of another one, and waits until it has caught up.
    pub async fn follow(&self, master: SocketAddr) {
        self.send(&format!("REPLICAOF 127.0.0.1 {}", master.port()))
            .await;
        eventually("the replica has caught up", async || {
            let replication = self.info("INFO replication").await;
            replication.contains("master_link_status:up")
        })
        .await;
    }

    /// Runs a command that returns text, such as INFO.
    pub async fn info(&self, command: &str) -> String {
        self.read(command).await
    }

    /// Runs a command of these words, and returns its answer.
    pub async fn read<T: FromRedisValue>(&self, command: &str) -> T {
        redis::from_redis_value(self.send(command).await).unwrap()
    }

    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    pub fn addr(&self) -> SocketAddr {
        ([127, 0, 0, 1], self.port).into()
    }

    /// Reads the append-only files.
    pub fn append_only_files(&self) -> Vec<(PathBuf, Vec<u8>)> {
        let folder = self.folder.path().join("appendonlydir");
        let files = std::fs::read_dir(folder).unwrap();
        let paths = files.map(|file| file.unwrap().path());
        paths
            .map(|path| (path.clone(), std::fs::read(&path).unwrap()))
            .collect()
    }

    /// Restores these files. The server must not be running.
    pub fn restore(&self, files: Vec<(PathBuf, Vec<u8>)>) {
        for (path, bytes) in files {
            std::fs::write(path, bytes).unwrap();
        }
    }

    pub fn kill(&mut self) {
        self.process = None;
    }

    /// Sends a signal to the server: `-STOP` freezes it, and `-CONT` resumes it.
    pub fn signal(&self, signal: &str) {
        let process = self.process.as_ref();
        process.expect("the server is not running").signal(signal);
    }

    /// Starts the server again, on the same port and in the same folder.
    pub async fn start_again(&mut self) {
        assert!(self.process.is_none(), "the server is already running");
        assert!(self.try_start().await, "redis-server did not start again");
    }

    /// Runs a command on a new connection. Panics if it fails.
    pub async fn command(&self, words: &[&str]) -> redis::Value {
        self.try_command(words).await.unwrap()
    }

    /// Runs a command on a new connection. The command may fail.
    pub async fn try_command(&self, words: &[&str]) -> RedisResult<redis::Value> {
        let mut connection = open(&self.url()).await.unwrap();
        let mut command = redis::cmd(words[0]);
        command.arg(&words[1..]).query_async(&mut connection).await
    }

    async fn try_start(&mut self) -> bool {
        let log = self.folder.path().join("redis.log");
        // Deletes the log of the previous start.
        let _ = std::fs::remove_file(&log);
        // Redis 6.2 does not have the option `cluster-port`.
        let cluster_port = self.cluster_port.to_string();
        let mut options = self.options.iter();
        let in_cluster = options.any(|option| option == "--cluster-enabled");
        let cluster = in_cluster.then_some(["--cluster-port", &cluster_port]);
        let mut command = Command::new("redis-server");
        command
            .args(["--port", &self.port.to_string(), "--bind", "127.0.0.1"])
            .args(["--logfile", "redis.log", "--save", ""])
            .args(cluster.into_iter().flatten())
            .args(&self.options)
            .envs(self.variables.iter().map(|(name, value)| (name, value)));
        let process = Process::run_in(self.folder.path(), command);
        let process = self.process.insert(process);
        for _ in 0..500 {
            if !process.runs() {
                self.process = None;
                return false;
            }
            // Another server may have taken the port and may answer on it, so only the log shows
            // whether this server is ready.
            let log_text = std::fs::read_to_string(&log).unwrap_or_default();
            if log_text.contains("Ready to accept connections") {
                return true;
            }
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        }
        false
    }
}

/// A single sentinel that watches one master.
pub struct Sentinel {
    _process: Process,
    port: u16,
    _folder: TempDir,
}

impl Sentinel {
    pub fn start(master: &RedisServer) -> Self {
        let (port, addr) = (free_port(), master.addr());
        Self::start_with(port, addr, &[&format!("port {port}")])
    }

    /// Starts a sentinel on this port for the master at this address, with these additional
    /// configuration lines.
    pub fn start_with(port: u16, master: SocketAddr, lines: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("sentinel.conf");
        let config = format!(
            "bind 127.0.0.1\nlogfile sentinel.log\ndir {}\n\
             sentinel monitor the-master 127.0.0.1 {} 1\n\
             sentinel down-after-milliseconds the-master 300\n\
             sentinel failover-timeout the-master 2000\n{}\n",
            folder.path().display(),
            master.port(),
            lines.join("\n"),
        );
        std::fs::write(&file, config).unwrap();
        let mut command = Command::new("redis-server");
        command.arg(&file).arg("--sentinel");
        Self {
            _process: Process::run_in(folder.path(), command),
            port,
            _folder: folder,
        }
    }

    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }
}

/// Dumps the values of these keys.
pub async fn dump(server: &RedisServer, keys: &[&str]) -> Vec<(String, Vec<u8>)> {
    let mut dumped = vec![];
    for key in keys {
        match server.command(&["DUMP", key]).await {
            redis::Value::BulkString(bytes) => dumped.push(((*key).to_owned(), bytes)),
            other => panic!("{key}: {other:?}"),
        }
    }
    dumped
}

/// Restores dumped keys. Token counters do not expire, and all other keys expire after a minute.
pub async fn restore(server: &RedisServer, dumped: &[(String, Vec<u8>)]) {
    let mut connection = open(&server.url()).await.unwrap();
    for (key, bytes) in dumped {
        let ms = if key.ends_with("clock") { 0 } else { 60_000 };
        let mut restore = redis::cmd("RESTORE");
        restore.arg(key).arg(ms).arg(bytes).arg("REPLACE");
        restore.exec_async(&mut connection).await.unwrap();
    }
}
