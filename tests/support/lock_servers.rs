//! Lock servers of others, each of a test's own, and programs that hold their locks.

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

/// Starts a program, and waits until it `answers`; `None` where it ends before, since somebody else has its port.
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

/// A ZooKeeper ensemble of one, which elects its leader at each start.
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

    /// The last zxid of all.
    pub async fn zxid(&self) -> Option<i64> {
        let mut told = String::new();
        let ask = async {
            let mut stream = TcpStream::connect(self.hosts()).await.ok()?;
            stream.write_all(b"srvr").await.ok()?;
            stream.read_to_string(&mut told).await.ok()
        };
        timeout(Duration::from_secs(1), ask).await.ok()??;
        let zxid = told.lines().find_map(|line| line.strip_prefix("Zxid: 0x"));
        zxid.map(|zxid| i64::from_str_radix(zxid, 16).unwrap())
    }

    /// Kills the server as `kill -9` does.
    pub fn kill(&mut self) {
        kill(&mut self.child);
    }

    /// Starts the server again, with the data that it has.
    pub async fn start_again(&mut self) {
        assert!(self.try_start().await, "ZooKeeper did not start again");
    }

    /// Loses the data directory. The server must not run.
    pub fn forget(&self) {
        let data = self.folder.path().join("data");
        let _ = fs::remove_dir_all(&data);
        fs::create_dir_all(&data).unwrap();
        fs::write(data.join("myid"), "1").unwrap();
    }

    /// Has the next leader begin behind this epoch. The server must not run.
    pub fn set_epoch(&self, epoch: u32) {
        for name in ["acceptedEpoch", "currentEpoch"] {
            let file = self.folder.path().join("data/version-2").join(name);
            fs::write(file, epoch.to_string()).unwrap();
        }
    }

    /// A program that takes the lock of a SKU and writes; see `examples/zookeeper.py`.
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

/// An etcd of one member.
pub struct Etcd {
    port: u16,
    peer_port: u16,
    folder: TempDir,
    /// Its data, in the folder.
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
            // With these a lease may be as short as two seconds.
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

    /// The last revision of all, by a linearizable read.
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

    /// Saves a snapshot to a file, a path in this folder.
    pub fn snapshot(&self) {
        let file = self.folder.path().join("snapshot");
        let saved = self.ctl().args(["snapshot", "save"]).arg(file).output();
        assert!(saved.unwrap().status.success());
    }

    /// Goes on from the snapshot.
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

    /// A program that takes the lock of a SKU and writes; see `examples/etcd.sh`.
    pub fn holder(&self, sku: &str, inventory: &str, thinking: f64) -> Holder {
        self.holder_above(0, sku, inventory, thinking)
    }

    /// The same, with tokens that begin above `offset`.
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

/// The last revision of an etcd, by a linearizable read.
pub async fn revision(url: &str) -> Option<i64> {
    let read = crate::http::client()
        .post(format!("{url}/v3/kv/range"))
        .body(r#"{"key": "AA=="}"#);
    let read: serde_json::Value = read.send().await.ok()?.json().await.ok()?;
    read["header"]["revision"].as_str()?.parse().ok()
}

/// A program that holds a lock, with the programs that it has started.
pub struct Holder(Process);

impl Holder {
    /// Waits until it has the lock, and tells its token.
    pub async fn token(&mut self) -> i64 {
        self.0.prints("and counts", 1).await;
        let stdout = self.0.stdout();
        let (_, behind) = stdout.split_once("with token ").unwrap();
        let (token, _) = behind.split_once(',').unwrap();
        token.parse().unwrap()
    }

    /// Waits until it has written, and tells the status of the answer.
    pub async fn status(&mut self) -> u16 {
        self.0.prints("answered ", 1).await;
        self.0.prints("\n", 2).await;
        let stdout = self.0.stdout();
        let (_, status) = stdout.trim_end().rsplit_once(' ').unwrap();
        status.parse().unwrap()
    }

    /// Lets it take the lock, write, and give the lock back.
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

/// What it has started does not outlive it.
impl Drop for Holder {
    fn drop(&mut self) {
        for pid in family(self.0.id()).into_iter().skip(1) {
            let _ = Command::new("kill")
                .args(["-KILL", &pid.to_string()])
                .status();
        }
    }
}

/// A process and all that it has started, the eldest first.
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
    // Behind the name: the state, the parent.
    let (_, behind) = stat.rsplit_once(") ")?;
    behind.split(' ').nth(1)?.parse().ok()
}
