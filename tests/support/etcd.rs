//! etcd: a shared server, and clusters that a test can stop and restore.

use std::{
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use base64::{Engine, prelude::BASE64_STANDARD};
use serde_json::{Value, json};
use sqlx::Sqlite;
use tempfile::TempDir;
use tower_fence::{epochs::Epochs, lease::LeaseError};
use tower_fence_etcd::{EtcdLeases, EtcdLeasesBuilder};

use super::{
    certificates::Certificates,
    database::{Fresh, TestDatabase},
    eventually,
    http::client,
    ports::free_port,
    process::Process,
    proxy::Proxy,
};

const ROOT_PASSWORD: &str = "the root's";

/// Returns the URL of the shared server. Each test uses its own key prefix on it.
pub fn shared_url() -> String {
    super::variable("TEST_ETCD_URL")
}

/// Connects to etcd with the default settings.
pub async fn connect<U: AsRef<str>>(
    urls: &[U],
    epochs: impl Epochs + 'static,
) -> Result<EtcdLeases, LeaseError> {
    EtcdLeasesBuilder::new(epochs).connect(urls).await
}

/// Starts a cluster of one node, and connects a store with the epochs of a new database.
pub async fn with_leases() -> (EtcdCluster, Fresh<Sqlite>, EtcdLeases) {
    let (cluster, db) = (EtcdCluster::start(1).await, Sqlite::fresh(2).await);
    let leases = connect(&cluster.urls(), db.fence()).await.unwrap();
    (cluster, db, leases)
}

/// A cluster that only this test uses.
pub struct EtcdCluster {
    nodes: Vec<Node>,
    folder: TempDir,
    /// The cluster token. Together with the addresses of the members, it determines the cluster id.
    token: String,
    tls: Option<Certificates>,
    http: reqwest::Client,
}

struct Node {
    name: String,
    port: u16,
    peer_port: u16,
    process: Option<Process>,
}

impl EtcdCluster {
    /// Starts `count` nodes on free ports.
    pub async fn start(count: usize) -> Self {
        Self::start_with(count, None).await
    }

    /// Starts one node that accepts only TLS clients with a certificate.
    pub async fn start_with_tls(certificates: &Certificates) -> Self {
        Self::start_with(1, Some(certificates)).await
    }

    async fn start_with(count: usize, tls: Option<&Certificates>) -> Self {
        for _ in 0..5 {
            let node = |n| Node {
                name: format!("node-{n}"),
                port: free_port(),
                peer_port: free_port(),
                process: None,
            };
            let mut cluster = Self {
                nodes: (0..count).map(node).collect(),
                folder: tempfile::tempdir().unwrap(),
                token: "the-cluster".into(),
                tls: tls.cloned(),
                http: match tls {
                    #[cfg(feature = "program")]
                    Some(certificates) => certificates.client(),
                    _ => client(),
                },
            };
            cluster.start_all();
            tokio::time::sleep(Duration::from_millis(300)).await;
            let mut nodes = cluster.nodes.iter_mut();
            if nodes.all(|node| node.process.as_mut().is_some_and(Process::runs)) {
                cluster.is_up().await;
                return cluster;
            }
        }
        panic!("etcd could not be started: use tests/run");
    }

    pub fn urls(&self) -> Vec<String> {
        let urls = self.nodes.iter().map(|node| self.client_url(node.port));
        urls.collect()
    }

    fn client_url(&self, port: u16) -> String {
        match &self.tls {
            Some(_) => format!("https://127.0.0.1:{port}"),
            None => url(port),
        }
    }

    /// Connects a store through a proxy in front of the first node.
    pub async fn connect_through(
        &self,
        proxy: &Proxy,
        epochs: impl Epochs + 'static,
    ) -> EtcdLeases {
        let url = proxy.url(&self.urls()[0]);
        connect(&[url], epochs).await.unwrap()
    }

    /// Deletes the keys with this prefix.
    pub async fn delete(&self, prefix: &str) {
        for (key, _) in self.keys(prefix).await {
            let body = json!({ "key": base64(&key) });
            self.call("/v3/kv/deleterange", &body).await;
        }
    }

    /// Makes this number of revisions, with a key of another program.
    pub async fn write_foreign(&self, count: usize) {
        for n in 0..count {
            self.put("foreign", &n.to_string()).await;
        }
    }

    /// Grants etcd leases, which are entries of the log without revisions.
    pub async fn grant_foreign(&self, count: usize) {
        for _ in 0..count {
            self.call("/v3/lease/grant", &json!({ "TTL": 60 })).await;
        }
    }

    /// Deletes all keys, as an operator might do by mistake.
    pub async fn delete_all(&self) {
        // The range from the first key to the last.
        let everything = json!({ "key": "AA==", "range_end": "AA==" });
        self.call("/v3/kv/deleterange", &everything).await;
    }

    pub fn addr(&self) -> std::net::SocketAddr {
        self.addrs()[0]
    }

    pub fn addrs(&self) -> Vec<std::net::SocketAddr> {
        let ports = self.nodes.iter().map(|node| node.port);
        ports.map(|port| ([127, 0, 0, 1], port).into()).collect()
    }

    pub fn start_all(&mut self) {
        for n in 0..self.nodes.len() {
            self.start_node(n);
        }
    }

    pub fn start_node(&mut self, n: usize) {
        let node = &self.nodes[n];
        assert!(node.process.is_none(), "the node is already running");
        let (client, peer) = (self.client_url(node.port), url(node.peer_port));
        let mut command = Command::new("etcd");
        command
            .args(["--name", &node.name, "--data-dir", &node.name])
            .args(["--listen-client-urls", &client])
            .args(["--advertise-client-urls", &client])
            .args(["--listen-peer-urls", &peer])
            .args(["--initial-advertise-peer-urls", &peer])
            .args(["--initial-cluster", &self.members()])
            .args(["--initial-cluster-token", &self.token])
            .args(["--heartbeat-interval", "50", "--election-timeout", "500"])
            .args(["--logger", "zap", "--log-level", "fatal"])
            .arg("--unsafe-no-fsync")
            .args(self.tls.iter().flat_map(Certificates::etcd_arguments));
        self.nodes[n].process = Some(Process::run_in(self.folder.path(), command));
    }

    /// Waits until the cluster answers a read that needs a majority.
    pub async fn is_up(&self) {
        eventually("etcd answers", async || {
            let key = json!({ "key": "YQ==" });
            let read = self.try_call("/v3/kv/range", &key).await;
            read.is_some_and(|read| read["header"]["revision"].is_string())
        })
        .await;
    }

    pub fn kill(&mut self, n: usize) {
        self.nodes[n].process = None;
    }

    pub fn kill_all(&mut self) {
        self.nodes.iter_mut().for_each(|node| node.process = None);
    }

    /// Sends a signal to a node: `-STOP` freezes it, and `-CONT` resumes it.
    pub fn signal(&self, n: usize, signal: &str) {
        let process = self.nodes[n].process.as_ref();
        process.expect("the node is not running").signal(signal);
    }

    /// Returns the leader, after an election if there is none.
    pub async fn leader(&self) -> usize {
        let mut leader = None;
        eventually("there is a leader", async || {
            leader = self.find_leader().await;
            leader.is_some()
        })
        .await;
        leader.unwrap()
    }

    async fn find_leader(&self) -> Option<usize> {
        for (n, node) in self.nodes.iter().enumerate() {
            let body = json!({});
            let status = self.post(node.port, "/v3/maintenance/status", &body);
            if let Some(status) = status.await
                && status["leader"] == status["header"]["member_id"]
            {
                return Some(n);
            }
        }
        None
    }

    /// Saves a snapshot, and returns its path.
    pub fn save(&self, name: &str) -> PathBuf {
        let path = self.folder.path().join(name);
        let endpoint = format!("127.0.0.1:{}", self.nodes[0].port);
        let save = ["--endpoints", &endpoint, "snapshot", "save"];
        etcdctl(&save, &path);
        path
    }

    /// Restores all nodes from a snapshot, with this cluster token. If the token is unchanged, the
    /// restored cluster has the same cluster id.
    pub async fn restore(&mut self, snapshot: &Path, token: &str) {
        self.kill_all();
        self.token = token.into();
        for node in &self.nodes {
            let folder = self.folder.path().join(&node.name);
            std::fs::remove_dir_all(&folder).unwrap();
            let folder = folder.to_str().unwrap();
            let peer = url(node.peer_port);
            let (name, members) = (&node.name, self.members());
            let restore = format!(
                "--name {name} --data-dir {folder} --initial-cluster {members} \
                 --initial-advertise-peer-urls {peer} --initial-cluster-token {token} \
                 snapshot restore"
            );
            etcdctl(&Vec::from_iter(restore.split(' ')), snapshot);
        }
        self.start_all();
        self.is_up().await;
    }

    /// Copies the data of the first node. The node must not be running.
    pub fn copy_data(&self) -> PathBuf {
        let copy = self.folder.path().join("copy");
        copy_folder(&self.folder.path().join(&self.nodes[0].name), &copy);
        copy
    }

    /// Restores the data of the first node. The node must not be running.
    pub fn put_back(&self, copy: &Path) {
        let folder = self.folder.path().join(&self.nodes[0].name);
        std::fs::remove_dir_all(&folder).unwrap();
        copy_folder(copy, &folder);
    }

    /// Calls a method on the first node that answers.
    pub async fn call(&self, path: &str, body: &Value) -> Value {
        self.try_call(path, body).await.expect("no node answers")
    }

    async fn try_call(&self, path: &str, body: &Value) -> Option<Value> {
        for node in &self.nodes {
            if let Some(answer) = self.post(node.port, path, body).await {
                return Some(answer);
            }
        }
        None
    }

    async fn post(&self, port: u16, path: &str, body: &Value) -> Option<Value> {
        let url = format!("{}{path}", self.client_url(port));
        let request = self.http.post(url).json(body);
        let answer = request.timeout(Duration::from_secs(2)).send().await.ok()?;
        answer.json().await.ok()
    }

    async fn kvs(&self, prefix: &str) -> Vec<Value> {
        let end = format!("{prefix}\u{7f}");
        let body = json!({ "key": base64(prefix), "range_end": base64(&end) });
        let found = self.call("/v3/kv/range", &body).await;
        found["kvs"].as_array().cloned().unwrap_or_default()
    }

    /// Returns all keys with this prefix and their values, as text.
    pub async fn keys(&self, prefix: &str) -> Vec<(String, String)> {
        let kvs = self.kvs(prefix).await;
        let kvs = kvs.iter().map(|kv| (text(&kv["key"]), text(&kv["value"])));
        kvs.collect()
    }

    /// Revokes the etcd leases of all keys with this prefix. This deletes the keys.
    pub async fn revoke(&self, prefix: &str) {
        for kv in self.kvs(prefix).await {
            let body = json!({ "ID": kv["lease"] });
            self.call("/v3/lease/revoke", &body).await;
        }
    }

    /// Revokes the etcd leases to which no key is attached.
    pub async fn revoke_unused(&self) {
        let found = self.call("/v3/lease/leases", &json!({})).await;
        for lease in found["leases"].as_array().into_iter().flatten() {
            let body = json!({ "ID": lease["ID"], "keys": true });
            let lives = self.call("/v3/lease/timetolive", &body).await;
            if lives["keys"].as_array().is_none_or(Vec::is_empty) {
                self.call("/v3/lease/revoke", &body).await;
            }
        }
    }

    /// Returns the remaining seconds of the etcd lease of the first key with this prefix.
    pub async fn time_left(&self, prefix: &str) -> i64 {
        let kvs = self.kvs(prefix).await;
        let body = json!({ "ID": kvs[0]["lease"] });
        let left = self.call("/v3/lease/timetolive", &body).await;
        left["TTL"].as_str().unwrap().parse().unwrap()
    }

    /// Compacts all revisions before the current one.
    pub async fn compact(&self) {
        let body = json!({ "revision": self.revision().await.to_string() });
        self.call("/v3/kv/compaction", &body).await;
    }

    /// Returns the number of etcd leases.
    pub async fn leases(&self) -> usize {
        let found = self.call("/v3/lease/leases", &json!({})).await;
        found["leases"].as_array().map_or(0, Vec::len)
    }

    /// Returns the current revision.
    pub async fn revision(&self) -> i64 {
        let read = self.call("/v3/kv/range", &json!({ "key": "YQ==" })).await;
        let revision = read["header"]["revision"].as_str();
        revision.unwrap().parse().unwrap()
    }

    pub async fn put(&self, key: impl AsRef<[u8]>, value: &str) {
        let body = json!({ "key": base64(key), "value": base64(value) });
        self.call("/v3/kv/put", &body).await;
    }

    /// Enables authentication, and adds a user with read and write permission for the keys with the
    /// default prefix.
    pub async fn add_user(&self, name: &str, password: &str) {
        self.add_user_with("READWRITE", name, password).await;
    }

    /// Like [`add_user`](Self::add_user), with this permission.
    pub async fn add_user_with(&self, permission: &str, name: &str, password: &str) {
        let (key, end) = (base64("tower-fence:"), base64("tower-fence;"));
        let keys = json!({ "permType": permission, "key": key, "range_end": end });
        let root = json!({ "name": "root", "password": ROOT_PASSWORD });
        for (path, body) in [
            ("user/add", root),
            ("user/grant", json!({ "user": "root", "role": "root" })),
            ("user/add", json!({ "name": name, "password": password })),
            ("role/add", json!({ "name": "locks" })),
            ("role/grant", json!({ "name": "locks", "perm": keys })),
            ("user/grant", json!({ "user": name, "role": "locks" })),
            ("enable", json!({})),
        ] {
            self.call(&format!("/v3/auth/{path}"), &body).await;
        }
    }

    /// Changes the password of a user, as root. Earlier auth tokens of the user become invalid.
    pub async fn change_password(&self, name: &str, password: &str) {
        let root = json!({ "name": "root", "password": ROOT_PASSWORD });
        let token = self.call("/v3/auth/authenticate", &root).await;
        let url = format!("{}/v3/auth/user/changepw", self.urls()[0]);
        let body = json!({ "name": name, "password": password });
        let request = self.http.post(url).json(&body);
        let request = request.header("Authorization", token["token"].as_str().unwrap());
        request.send().await.unwrap().error_for_status().unwrap();
    }

    fn members(&self) -> String {
        let member = |node: &Node| format!("{}={}", node.name, url(node.peer_port));
        self.nodes.iter().map(member).collect::<Vec<_>>().join(",")
    }
}

pub fn base64(text: impl AsRef<[u8]>) -> String {
    BASE64_STANDARD.encode(text)
}

fn text(bytes: &Value) -> String {
    let bytes = BASE64_STANDARD.decode(bytes.as_str().unwrap_or_default());
    String::from_utf8(bytes.unwrap()).unwrap()
}

fn url(port: u16) -> String {
    format!("http://127.0.0.1:{port}")
}

fn copy_folder(from: &Path, to: &Path) {
    let copied = Command::new("cp").arg("-r").args([from, to]).status();
    assert!(copied.unwrap().success());
}

fn etcdctl(arguments: &[&str], last: &Path) {
    let (options, command) = arguments.split_at(arguments.len() - 2);
    let done = Command::new("etcdctl")
        .env("ETCDCTL_API", "3")
        .args(command)
        .arg(last)
        .args(options)
        .output()
        .expect("etcdctl is not installed: use tests/run");
    assert!(done.status.success(), "{done:?}");
}
