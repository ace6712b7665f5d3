//! Clients in a separate process, with one client of each workload and side. Faults freeze the
//! process, or kill it in the middle of a request.

use std::{
    collections::HashMap,
    env,
    io::{BufRead, BufReader, Read},
    mem::discriminant,
    process::{Child, Command, Stdio},
    sync::Arc,
    thread::JoinHandle,
};

use tokio::sync::watch;

use super::{Settings, Side, WORKLOADS, start};
use crate::{
    history::{Operation, Recorder},
    support::process::send_signal,
};

/// The output of a process: its operations. The flag is whether the side of the operation is
/// fenced.
type Printed = Vec<(bool, Operation)>;

pub struct ClientProcess {
    settings: Settings,
    sides: [Arc<Side>; 2],
    child: Child,
    reader: Option<JoinHandle<Printed>>,
}

impl ClientProcess {
    pub fn start(mut settings: Settings, sides: &[Arc<Side>; 2]) -> Self {
        settings.process += 1;
        let (child, reader) = run(&settings);
        Self {
            settings,
            sides: sides.clone(),
            child,
            reader: Some(reader),
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
        self.collect();
        self.settings.process += 1;
        let (child, reader) = run(&self.settings);
        (self.child, self.reader) = (child, Some(reader));
    }

    /// Stops the process.
    pub fn stop(mut self) {
        drop(self.child.stdin.take());
        let ended = self.child.wait().unwrap();
        assert!(ended.success(), "a client has failed");
        self.collect();
    }

    /// Records the operations that an ended process has printed. Operations without an answer stay
    /// unknown.
    fn collect(&mut self) {
        let printed = self.reader.take().unwrap().join().unwrap();
        // An operation is identified by its kind and the moment at which it was requested.
        let which = |(is_fenced, operation): (bool, Operation)| {
            let Operation {
                kind,
                resource,
                invoked,
                ..
            } = operation;
            let which = (is_fenced, resource, invoked, discriminant(&kind));
            (which, operation)
        };
        let operations: HashMap<_, _> = printed.into_iter().map(which).collect();
        for ((is_fenced, ..), operation) in operations {
            let side = &self.sides[usize::from(!is_fenced)];
            side.recorder.record([operation]);
        }
    }
}

impl Drop for ClientProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn run(settings: &Settings) -> (Child, JoinHandle<Printed>) {
    let settings = serde_json::to_string(settings).unwrap();
    let mut child = Command::new(env::current_exe().unwrap())
        .args(["clients", &settings])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let output = BufReader::new(child.stdout.take().unwrap());
    let reader = std::thread::spawn(move || {
        let lines = output.lines().map(Result::unwrap);
        let operation = |line: String| serde_json::from_str(&line).unwrap();
        lines.map(operation).collect()
    });
    (child, reader)
}

/// Runs the clients in the process until its standard input is closed.
pub async fn work(settings: &str) {
    let settings: Settings = serde_json::from_str(settings).unwrap();
    let (stop, stopped) = watch::channel(false);
    std::thread::spawn(move || {
        let _ = std::io::stdin().read_to_end(&mut vec![]);
        stop.send_replace(true);
    });
    let sides = Side::both(&settings, Recorder::printing);
    let clients = start(&settings, &sides, [1; WORKLOADS.len()], &stopped);
    clients.join_all().await;
}
