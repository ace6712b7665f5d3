//! Third-party lock servers that only one test uses, and programs that hold their locks.

use std::{
    collections::HashMap,
    fs,
    path::Path,
    process::{Child, Command, Stdio},
    time::Duration,
};

use tempfile::TempDir;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::{sleep, timeout},
};

use super::{
    ports::free_port,
    process::{Process, python, send_signal},
};

/// Starts a program, and waits until it answers. Returns `None` if it does not, for example because
/// another process has taken its port.
async fn start(mut command: Command, answers: impl AsyncFn() -> bool) -> Option<Child> {
    command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    let mut child = command.spawn().expect("not installed: use tests/run");
    for _ in 0..1_000 {
        if child.try_wait().unwrap().is_some() {
            return None;
        }
        if answers().await {
            return Some(child);
        }
        sleep(Duration::from_millis(20)).await;
    }
    child.kill().unwrap();
    child.wait().unwrap();
    None
}

fn kill(child: &mut Option<Child>) {
    if let Some(mut child) = child.take() {
        child.kill().unwrap();
        child.wait().unwrap();
    }
}

/// A ZooKeeper ensemble of one server, which elects itself as the leader at each start.
pub struct ZooKeeper {
    port: u16,
    folder: TempDir,
    child: Option<Child>,
}

impl ZooKeeper {
    pub async fn start() -> Self {
        for _ in 0..5 {
            let folder = tempfile::tempdir().unwrap();
            let [port, quorum, election] = [(); 3].map(|()| free_port());
            let data = folder.path().join("data");
            let config = format!(
                "dataDir={}\ntickTime=100\ninitLimit=50\nsyncLimit=50\n\
                 standaloneEnabled=false\nreconfigEnabled=false\nadmin.enableServer=false\n\
                 server.1=127.0.0.1:{quorum}:{election};127.0.0.1:{port}\n",
                data.display()
            );
            fs::write(folder.path().join("zoo.cfg"), config).unwrap();
            let child = None;
            let mut server = Self {
                port,
                folder,
                child,
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
            .arg(self.folder.path().join("zoo.cfg"))
            .current_dir(self.folder.path());
        self.child = start(command, async || self.zxid().await.is_some()).await;
        self.child.is_some()
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
        kill(&mut self.child);
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
    pub fn holder(&self, sku: &str, inventory: &str, thinking: f64) -> Holder {
        let mut command = python("examples/zookeeper.py");
        command
            .arg(sku)
            .env("ZOOKEEPER_HOSTS", self.hosts())
            .env("SESSION", "2")
            .env("INVENTORY_URL", inventory)
            .env("THINKING", thinking.to_string());
        Holder(Process::run(command))
    }
}

impl Drop for ZooKeeper {
    fn drop(&mut self) {
        self.kill();
    }
}

/// An etcd cluster of one member.
pub struct Etcd {
    port: u16,
    peer_port: u16,
    folder: TempDir,
    /// The data directory in the folder.
    data: &'static str,
    child: Option<Child>,
}

impl Etcd {
    pub async fn start() -> Self {
        for _ in 0..5 {
            let mut server = Self {
                port: free_port(),
                peer_port: free_port(),
                folder: tempfile::tempdir().unwrap(),
                data: "data",
                child: None,
            };
            if server.try_start().await {
                return server;
            }
        }
        panic!("etcd could not be started: use tests/run");
    }

    async fn try_start(&mut self) -> bool {
        let (url, peer_url) = (self.url(), self.peer_url());
        let mut command = Command::new("etcd");
        command
            .args(["--name", "default", "--data-dir", self.data])
            .args([
                "--listen-client-urls",
                &url,
                "--advertise-client-urls",
                &url,
            ])
            .args(["--listen-peer-urls", &peer_url])
            .args(["--initial-advertise-peer-urls", &peer_url])
            .args(["--initial-cluster", &format!("default={peer_url}")])
            // With these timeouts, etcd grants leases as short as two seconds.
            .args(["--heartbeat-interval", "50", "--election-timeout", "300"])
            .current_dir(self.folder.path());
        self.child = start(command, async || self.revision().await.is_some()).await;
        self.child.is_some()
    }

    pub fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    fn peer_url(&self) -> String {
        format!("http://127.0.0.1:{}", self.peer_port)
    }

    /// Returns the current revision. The read is linearizable.
    pub async fn revision(&self) -> Option<i64> {
        revision(&self.url()).await
    }

    pub fn ctl(&self) -> Command {
        let mut command = Command::new("etcdctl");
        command
            .env("ETCDCTL_API", "3")
            .env("ETCDCTL_ENDPOINTS", self.url());
        command
    }

    /// Saves a snapshot in the folder.
    pub fn snapshot(&self) {
        let file = self.folder.path().join("snapshot");
        let saved = self.ctl().args(["snapshot", "save"]).arg(file).output();
        assert!(saved.unwrap().status.success());
    }

    /// Restarts the server from the snapshot.
    pub async fn restore(&mut self) {
        kill(&mut self.child);
        self.data = "restored";
        let peer_url = self.peer_url();
        let restored = self
            .ctl()
            .args(["snapshot", "restore", "snapshot", "--name", "default"])
            .args(["--data-dir", self.data])
            .args(["--initial-advertise-peer-urls", &peer_url])
            .args(["--initial-cluster", &format!("default={peer_url}")])
            .current_dir(self.folder.path())
            .output();
        assert!(restored.unwrap().status.success());
        assert!(self.try_start().await, "etcd did not start again");
    }

    /// Starts a program that takes the lock of a SKU and writes. See `examples/etcd.sh`.
    pub fn holder(&self, sku: &str, inventory: &str, thinking: f64) -> Holder {
        self.holder_above(0, sku, inventory, thinking)
    }

    /// Like [`holder`](Self::holder), with an offset that is added to the tokens.
    pub fn holder_above(&self, offset: i64, sku: &str, inventory: &str, thinking: f64) -> Holder {
        let mut command = self.ctl();
        command
            .args(["lock", "--ttl", "2", sku, "--", "examples/etcd.sh", sku])
            .env("INVENTORY_URL", inventory)
            .env("THINKING", thinking.to_string())
            .env("TOKEN_OFFSET", offset.to_string());
        Holder(Process::run(command))
    }
}

impl Drop for Etcd {
    fn drop(&mut self) {
        kill(&mut self.child);
    }
}

/// Returns the current revision of etcd. The read is linearizable.
pub async fn revision(url: &str) -> Option<i64> {
    let read = crate::http::client()
        .post(format!("{url}/v3/kv/range"))
        .body(r#"{"key": "AA=="}"#);
    let read: serde_json::Value = read.send().await.ok()?.json().await.ok()?;
    read["header"]["revision"].as_str()?.parse().ok()
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
            let _ = Command::new("kill")
                .args(["-KILL", &pid.to_string()])
                .status();
        }
    }
}

/// Returns a process and all its descendants, parents first.
fn family(eldest: u32) -> Vec<u32> {
    let parents = fs::read_dir("/proc")
        .unwrap()
        .flatten()
        .filter_map(|entry| {
            let pid: u32 = entry.file_name().to_str()?.parse().ok()?;
            Some((pid, parent(&entry.path())?))
        });
    let parents: HashMap<u32, u32> = parents.collect();
    let mut family = vec![eldest];
    let mut at = 0;
    while let Some(&one) = family.get(at) {
        let children = parents.iter().filter(|(_, parent)| **parent == one);
        family.extend(children.map(|(pid, _)| *pid));
        at += 1;
    }
    family
}

fn parent(process: &Path) -> Option<u32> {
    let stat = fs::read_to_string(process.join("stat")).ok()?;
    // The name is followed by the state and the parent.
    let (_, behind) = stat.rsplit_once(") ")?;
    behind.split(' ').nth(1)?.parse().ok()
}
