//! A server program with its own folder and a free port. The program runs until its value is
//! dropped.

use std::{
    net::{SocketAddr, TcpStream},
    process::{Child, Command, Stdio},
    thread::sleep,
    time::Duration,
};

use tempfile::TempDir;

use super::ports::free_port;

pub struct Program {
    pub addr: SocketAddr,
    child: Child,
    _folder: TempDir,
}

impl Program {
    /// Starts a Redis server that writes nothing to disk, which is sufficient for the issuer.
    pub fn redis() -> Self {
        let port = free_port();
        let port_text = port.to_string();
        let arguments = ["--port", &port_text, "--bind", "127.0.0.1", "--save", ""];
        Self::start("redis-server", &arguments, port)
            .expect("redis-server is not installed (Debian: apt-get install redis-server)")
    }

    /// Starts an etcd server with one node, or returns `None` if etcd is not installed.
    pub fn etcd() -> Option<Self> {
        let (port, peers) = (free_port(), free_port());
        let [client, peer] = [port, peers].map(|port| format!("http://127.0.0.1:{port}"));
        let cluster = format!("default={peer}");
        let arguments = [
            ["--data-dir", "data"],
            ["--listen-client-urls", &client],
            ["--advertise-client-urls", &client],
            ["--listen-peer-urls", &peer],
            ["--initial-advertise-peer-urls", &peer],
            ["--initial-cluster", &cluster],
            ["--logger", "zap"],
            ["--log-level", "error"],
        ];
        Self::start("etcd", arguments.as_flattened(), port)
    }

    /// Starts a program, or returns `None` if it is not installed.
    fn start(program: &str, arguments: &[&str], port: u16) -> Option<Self> {
        let folder = tempfile::tempdir().expect("a folder");
        let child = Command::new(program)
            .args(arguments)
            .current_dir(folder.path())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        let mut started = Self {
            addr: ([127, 0, 0, 1], port).into(),
            child: child.ok()?,
            _folder: folder,
        };
        for _ in 0..1_000 {
            if TcpStream::connect(started.addr).is_ok() {
                return Some(started);
            }
            let ended = started.child.try_wait().expect("its status");
            assert!(ended.is_none(), "{program} did not start");
            sleep(Duration::from_millis(10));
        }
        panic!("{program} does not listen");
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
