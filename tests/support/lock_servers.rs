//! Third-party lock servers that only one test uses, and programs that hold their locks.

use std::{fs, path::PathBuf, process::Command, time::Duration};

use tempfile::TempDir;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::{sleep, timeout},
};

use super::{
    etcd::EtcdCluster,
    ports::free_port,
    process::{Process, family, send_signal, try_signal},
};

/// A ZooKeeper ensemble of one server, which elects itself as the leader at each start.
pub struct ZooKeeper {
    process: Option<Process>,
    port: u16,
    folder: TempDir,
}

impl ZooKeeper {
    pub async fn start() -> Self {
        for _ in 0..5 {
            let folder = tempfile::tempdir().unwrap();
            let [port, quorum, election] = [(); 3].map(|()| free_port());
            let data = folder.path().join("data");
            let config = format!(
                "dataDir={}\ntickTime=100\nmaxSessionTimeout=60000\ninitLimit=50\nsyncLimit=50\n\
                 standaloneEnabled=false\nreconfigEnabled=false\nadmin.enableServer=false\n\
                 server.1=127.0.0.1:{quorum}:{election};127.0.0.1:{port}\n",
                data.display()
            );
            fs::write(folder.path().join("zoo.cfg"), config).unwrap();
            let mut server = Self {
                process: None,
                port,
                folder,
            };
            server.forget();
            if server.try_start().await {
                return server;
            }
        }
        panic!("ZooKeeper could not be started: use tests/run");
    }

    async fn try_start(&mut self) -> bool {
        let mut command = Command::new("java");
        command
            .args(["-Xmx64m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"])
            .args(["-cp", "/usr/share/java/zookeeper.jar"])
            .arg("org.apache.zookeeper.server.quorum.QuorumPeerMain")
            .arg(self.folder.path().join("zoo.cfg"));
        self.process = Some(Process::run_in(self.folder.path(), command));
        for _ in 0..1_000 {
            // The server exits if another process has taken one of its ports.
            if !self.process.as_mut().unwrap().runs() {
                break;
            }
            if self.zxid().await.is_some() {
                return true;
            }
            sleep(Duration::from_millis(20)).await;
        }
        self.kill();
        false
    }

    pub fn hosts(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    /// Returns the last zxid.
    pub async fn zxid(&self) -> Option<i64> {
        let mut status_text = String::new();
        let ask = async {
            let mut stream = TcpStream::connect(self.hosts()).await.ok()?;
            stream.write_all(b"srvr").await.ok()?;
            stream.read_to_string(&mut status_text).await.ok()
        };
        timeout(Duration::from_secs(1), ask).await.ok()??;
        let zxid = status_text
            .lines()
            .find_map(|line| line.strip_prefix("Zxid: 0x"));
        zxid.map(|zxid| i64::from_str_radix(zxid, 16).unwrap())
    }

    pub fn kill(&mut self) {
        self.process = None;
    }

    /// Restarts the server with its data.
    pub async fn start_again(&mut self) {
        assert!(self.try_start().await, "ZooKeeper did not start again");
    }

    /// Deletes the data directory. The server must not be running.
    pub fn forget(&self) {
        let data = self.folder.path().join("data");
        let _ = fs::remove_dir_all(&data);
        fs::create_dir_all(&data).unwrap();
        fs::write(data.join("myid"), "1").unwrap();
    }

    /// Sets the epoch after which the next leader begins. The server must not be running.
    pub fn set_epoch(&self, epoch: u32) {
        for name in ["acceptedEpoch", "currentEpoch"] {
            let file = self.folder.path().join("data/version-2").join(name);
            fs::write(file, epoch.to_string()).unwrap();
        }
    }

    /// Starts a program that takes the lock of a SKU and writes. See `examples/zookeeper.py`.
    pub fn holder(&self, sku: &str, inventory: &str) -> Holder {
        self.holder_with(60, sku, inventory, 0.0)
    }

    /// Like [`holder`](Self::holder), with a session timeout in seconds, and a time between the
    /// read and the write.
    pub fn holder_with(&self, session: u64, sku: &str, inventory: &str, thinking: f64) -> Holder {
        let mut command = Command::new(super::variable("TEST_PYTHON"));
        command
            .args(["examples/zookeeper.py", sku])
            .env("ZOOKEEPER_HOSTS", self.hosts())
            .env("SESSION", session.to_string())
            .env("INVENTORY_URL", inventory)
            .env("THINKING", thinking.to_string());
        Holder(Process::run(command))
    }
}

/// An etcd cluster of one node.
pub struct Etcd {
    cluster: EtcdCluster,
    snapshot: Option<PathBuf>,
}

impl Etcd {
    pub async fn start() -> Self {
        Self {
            cluster: EtcdCluster::start(1).await,
            snapshot: None,
        }
    }

    pub fn url(&self) -> String {
        self.cluster.urls().remove(0)
    }

    pub fn snapshot(&mut self) {
        self.snapshot = Some(self.cluster.save("snapshot"));
    }

    /// Restarts the server from the snapshot, with the same cluster id.
    pub async fn restore(&mut self) {
        let snapshot = self.snapshot.as_ref().expect("no snapshot was saved");
        self.cluster.restore(snapshot, "the-cluster").await;
    }

    /// Ends the session of the holder of this lock, as if its lease had expired.
    pub async fn end_session(&self, sku: &str) {
        self.cluster.revoke(&format!("{sku}/")).await;
    }

    /// Starts a program that takes the lock of a SKU and writes. See `examples/etcd.sh`.
    pub fn holder(&self, sku: &str, inventory: &str, thinking: f64) -> Holder {
        self.holder_above(0, sku, inventory, thinking)
    }

    /// Like [`holder`](Self::holder), with an offset that is added to the tokens.
    pub fn holder_above(&self, offset: i64, sku: &str, inventory: &str, thinking: f64) -> Holder {
        let mut command = Command::new("etcdctl");
        command
            .env("ETCDCTL_API", "3")
            .env("ETCDCTL_ENDPOINTS", self.url())
            .args(["lock", "--ttl", "60", sku, "--", "examples/etcd.sh", sku])
            .env("INVENTORY_URL", inventory)
            .env("THINKING", thinking.to_string())
            .env("TOKEN_OFFSET", offset.to_string());
        Holder(Process::run(command))
    }
}

/// A program that holds a lock. On drop, the program and its child processes are killed.
pub struct Holder(Process);

impl Holder {
    /// Waits until the program has the lock, and returns the token.
    pub async fn token(&mut self) -> i64 {
        self.0.prints("and counts", 1).await;
        let stdout = self.0.stdout();
        let (_, behind) = stdout.split_once("with token ").unwrap();
        let (token, _) = behind.split_once(',').unwrap();
        token.parse().unwrap()
    }

    /// Waits until the program has written, and returns the status of the response.
    pub async fn status(&mut self) -> u16 {
        self.0.prints("answered ", 1).await;
        self.0.prints("\n", 2).await;
        let stdout = self.0.stdout();
        let (_, status) = stdout.trim_end().rsplit_once(' ').unwrap();
        status.parse().unwrap()
    }

    /// Waits until the program has taken the lock, written, and released the lock.
    pub async fn finish(mut self) -> (i64, u16) {
        let done = (self.token().await, self.status().await);
        self.0.exit().await;
        done
    }

    pub fn freeze(&self) {
        self.signal("-STOP");
    }

    pub fn go_on(&self) {
        self.signal("-CONT");
    }

    fn signal(&self, signal: &str) {
        for pid in family(self.0.id()) {
            send_signal(pid, signal);
        }
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        for pid in family(self.0.id()).into_iter().skip(1) {
            try_signal(pid, "-KILL");
        }
    }
}
