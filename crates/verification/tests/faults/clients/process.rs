//! Clients in a separate process, with one client of each workload and side. Faults freeze the
//! process, or kill it in the middle of a request.

use std::{
    collections::HashMap,
    env,
    io::{BufRead, BufReader, Read},
    mem,
    process::{Child, Command, Stdio},
    sync::{Arc, atomic::AtomicI64},
    thread::JoinHandle,
};

use serde::{Deserialize, Serialize};
use tokio::{sync::watch, task::JoinSet};

use super::{Servers, Side, WORKLOADS, start};
use crate::{
    history::{Kind, Operation, Recorder},
    support::process::send_signal,
};

/// The settings of the process, passed in [`VARIABLE`].
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct Settings {
    pub urls: Vec<String>,
    pub database: String,
    pub store: String,
    /// The prefix of the resource names of the process.
    pub prefix: String,
    pub seed: u64,
}

const VARIABLE: &str = "FAULTS_CLIENTS";

/// The distance between the first entries of successive processes, so that entries are unique.
const ENTRIES: i64 = 1_000_000_000;

/// The output of a process: its operations. The flag is whether the side of the operation is
/// fenced.
type Printed = Vec<(bool, Operation)>;

pub struct ClientProcess {
    settings: Settings,
    sides: [Arc<Side>; 2],
    child: Child,
    reader: JoinHandle<Printed>,
    started: i64,
}

impl ClientProcess {
    pub fn start(settings: Settings, sides: &[Arc<Side>; 2]) -> Self {
        let (child, reader) = run(&settings, 1);
        Self {
            settings,
            sides: sides.clone(),
            child,
            reader,
            started: 1,
        }
    }

    pub fn signal(&self, signal: &str) {
        send_signal(self.child.id(), signal);
    }

    /// Kills the process with SIGKILL, and starts another one.
    pub fn replace(&mut self) {
        let ended = self.child.try_wait().unwrap();
        assert!(ended.is_none(), "a client has failed");
        self.child.kill().unwrap();
        self.child.wait().unwrap();
        self.started += 1;
        let (child, reader) = run(&self.settings, self.started);
        self.child = child;
        let reader = mem::replace(&mut self.reader, reader);
        self.collect(reader);
    }

    /// Stops the process.
    pub fn stop(mut self) {
        drop(self.child.stdin.take());
        let ended = self.child.wait().unwrap();
        assert!(ended.success(), "a client has failed");
        let reader = mem::replace(&mut self.reader, std::thread::spawn(Vec::new));
        self.collect(reader);
    }

    /// Records the operations that an ended process has printed. Operations without an answer stay
    /// unknown.
    fn collect(&self, reader: JoinHandle<Printed>) {
        let mut asked = HashMap::new();
        for (is_fenced, operation) in reader.join().unwrap() {
            // A grant is identified by the moment at which it was requested.
            let which = match (operation.kind, operation.written()) {
                (Kind::Grant, _) => (None, operation.invoked),
                (_, Some((entry, _))) => (Some(entry), 0),
                _ => {
                    let side = &self.sides[usize::from(!is_fenced)];
                    side.recorder.record([operation]);
                    continue;
                }
            };
            asked.insert((is_fenced, operation.resource, which), operation);
        }
        for ((is_fenced, ..), operation) in asked {
            self.sides[usize::from(!is_fenced)]
                .recorder
                .record([operation]);
        }
    }
}

impl Drop for ClientProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn run(settings: &Settings, number: i64) -> (Child, JoinHandle<Printed>) {
    let encoded = serde_json::json!((settings, number)).to_string();
    let mut child = Command::new(env::current_exe().unwrap())
        .arg("clients")
        .env(VARIABLE, encoded)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let output = BufReader::new(child.stdout.take().unwrap());
    let reader = std::thread::spawn(move || {
        let lines = output
            .lines()
            .map(|line| line.expect("the process prints text"));
        let operation =
            |line: String| serde_json::from_str(&line).expect("the process prints operations");
        lines.map(operation).collect()
    });
    (child, reader)
}

/// Runs the clients in the process until its standard input is closed.
pub async fn work() {
    let encoded = env::var(VARIABLE).expect("a run starts this process");
    let (settings, number): (Settings, i64) = serde_json::from_str(&encoded).unwrap();
    let (stop, stopped) = watch::channel(false);
    std::thread::spawn(move || {
        let _ = std::io::stdin().read_to_end(&mut vec![]);
        stop.send_replace(true);
    });
    let mut servers = Servers::new(settings.urls, settings.database, &settings.store);
    servers.entries = AtomicI64::new(ENTRIES * number);
    let servers = Arc::new(servers);
    let mut clients = JoinSet::new();
    for is_fenced in [true, false] {
        let recorder = Recorder::printing(is_fenced);
        let side = Arc::new(Side::new(is_fenced, &settings.prefix, recorder));
        // This seed differs from the seeds of the run itself and of earlier processes.
        let seed = settings.seed ^ (number.unsigned_abs() << 32);
        for task in start(&servers, &side, [1; WORKLOADS.len()], seed, &stopped) {
            clients.spawn(task);
        }
    }
    while let Some(client) = clients.join_next().await {
        client.expect("a client has failed");
    }
}
