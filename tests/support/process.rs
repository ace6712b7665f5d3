//! The examples and other programs, in separate processes.

use std::{
    fs,
    io::Read,
    ops::{Deref, DerefMut},
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    time::{Duration, Instant},
};

use futures_util::future::select_all;
use serde_json::{Value, json};
use tempfile::NamedTempFile;
use tokio::time::timeout;

use super::{
    eventually,
    http::{Answer, client},
};

/// Sends a signal. Returns false if the process has ended.
///
/// std can send only SIGKILL.
pub fn try_signal(pid: u32, signal: &str) -> bool {
    let sent = Command::new("kill")
        .args([signal, &pid.to_string()])
        .output();
    sent.unwrap().status.success()
}

/// Sends a signal. After `-STOP`, waits until all threads of the process have stopped, because a
/// thread may stop long after the signal on a busy machine.
pub fn send_signal(pid: u32, signal: &str) {
    assert!(try_signal(pid, signal), "{pid} has ended");
    while signal == "-STOP" && !stands_still(pid) {
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn stands_still(pid: u32) -> bool {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    let mut threads = threads.flatten();
    threads.all(|thread| stat(&thread.path()).is_none_or(|fields| fields[0] == "T"))
}

/// Returns the fields in the file `stat` of a process or a thread after its name, which may contain
/// any characters. The first two fields are the state and the parent.
pub fn stat(folder: &Path) -> Option<Vec<String>> {
    let stat = fs::read_to_string(folder.join("stat")).ok()?;
    let (_, fields) = stat.rsplit_once(") ")?;
    Some(fields.split(' ').map(str::to_owned).collect())
}

/// Returns a process and all its descendants, parents first. Without `/proc`, returns the process
/// alone.
pub fn family(eldest: u32) -> Vec<u32> {
    let all = fs::read_dir("/proc").into_iter().flatten().flatten();
    let parents = all.filter_map(|entry| {
        let pid = entry.file_name().to_str()?.parse().ok()?;
        Some((pid, stat(&entry.path())?.get(1)?.parse().ok()?))
    });
    let parents: Vec<(u32, u32)> = parents.collect();
    let mut family = vec![eldest];
    let mut at = 0;
    while let Some(&one) = family.get(at) {
        let children = parents.iter().filter(|(_, parent)| *parent == one);
        family.extend(children.map(|(pid, _)| pid));
        at += 1;
    }
    family
}

/// A running process, which is killed on drop.
pub struct Process {
    child: Child,
    log: NamedTempFile,
    stdout: NamedTempFile,
}

impl Process {
    /// Starts an example with these arguments and only these environment variables.
    pub fn start(example: &str, arguments: &[&str], variables: &[(&str, &str)]) -> Self {
        Self::start_binary(binary(example), arguments, variables)
    }

    fn start_binary(binary: PathBuf, arguments: &[&str], variables: &[(&str, &str)]) -> Self {
        let mut command = Command::new(binary);
        command
            .args(arguments)
            .env_remove("DATABASE_URL")
            .env_remove("REDIS_URL")
            .env_remove("TOKEN_KEY")
            .env_remove("TOKEN_KEY_FILE")
            .env_remove("WAIT_LIMIT_MS")
            .env_remove("RUST_LOG")
            .envs(variables.iter().copied());
        Self::run(command)
    }

    /// Starts a program in the root folder of the repository.
    pub fn run(command: Command) -> Self {
        Self::run_in(super::repository(), command)
    }

    /// Starts a program in this folder.
    pub fn run_in(folder: &Path, mut command: Command) -> Self {
        let log = NamedTempFile::new().unwrap();
        let stdout = NamedTempFile::new().unwrap();
        let child = command
            .current_dir(folder)
            .stdin(Stdio::null())
            .stdout(stdout.reopen().unwrap())
            .stderr(log.reopen().unwrap())
            .spawn()
            .unwrap_or_else(|error| panic!("{error}: {command:?}: use tests/run"));
        Self { child, log, stdout }
    }

    /// Returns all standard output that the process has written.
    pub fn stdout(&self) -> String {
        text_of(&self.stdout)
    }

    /// Returns all standard error output that the process has written.
    pub fn log(&self) -> String {
        text_of(&self.log)
    }

    /// Waits until the process has printed `text` at least `times` times.
    pub async fn prints(&mut self, text: &str, times: usize) {
        let deadline = Instant::now() + super::PATIENCE;
        while Instant::now() < deadline {
            if self.stdout().matches(text).count() >= times {
                return;
            }
            assert!(self.runs(), "the process has ended: {}", self.log());
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("never printed {text:?}: {}{}", self.stdout(), self.log());
    }

    pub fn runs(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }

    pub fn id(&self) -> u32 {
        self.child.id()
    }

    pub fn signal(&self, signal: &str) {
        send_signal(self.child.id(), signal);
    }

    /// Waits for the end of the process, without a timeout.
    pub async fn ends(&mut self) -> ExitStatus {
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    pub async fn exit(&mut self) -> ExitStatus {
        let exited = timeout(super::PATIENCE, self.ends()).await;
        exited.unwrap_or_else(|_| panic!("the process did not exit: {}", self.log()))
    }

    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

/// A running inventory service.
pub struct Inventory {
    pub url: String,
    process: Process,
}

impl Inventory {
    /// Starts the service on a free port and waits until it listens.
    pub async fn start(variables: &[(&str, &str)]) -> Self {
        let variables = [&[("LISTEN_ADDR", "127.0.0.1:0")], variables].concat();
        let mut process = Process::start("inventory", &[], &variables);
        process.prints("inventory listens on http://", 1).await;
        process.prints("\n", 1).await;
        let stdout = process.stdout();
        let (_, rest) = stdout.split_once("inventory listens on ").unwrap();
        let (url, _) = rest.split_once('\n').unwrap();
        Self {
            url: url.to_owned(),
            process,
        }
    }

    pub fn url(&self, path: &str) -> String {
        format!("{}{path}", self.url)
    }
}

impl Deref for Inventory {
    type Target = Process;

    fn deref(&self) -> &Process {
        &self.process
    }
}

impl DerefMut for Inventory {
    fn deref_mut(&mut self) -> &mut Process {
        &mut self.process
    }
}

/// Freezes a service whose requests wait for `sku-1` in turn with those of another service, and
/// releases the lease. Each granted request of the other service releases the lease immediately.
/// `turn` is the time for which the free lease is reserved for the next request. At most half of
/// these requests may be granted the lease only after a turn.
pub async fn frozen_process_delays_the_next_waiter(
    frozen: &Inventory,
    other: &Inventory,
    turn: Duration,
) {
    const DOOMED: u64 = 6;
    let client = client();
    let acquire = |service: &Inventory, body: Value| {
        Answer::to(client.post(service.url("/locks/sku-1")).json(&body))
    };
    let release = async |lease: &Value| {
        let release = client.delete(other.url("/locks/sku-1"));
        let release = release.header("Lease-Id", lease["lease_id"].as_str().unwrap());
        assert_eq!(Answer::to(release).await.status, 204);
    };
    let line = async |length: u64| {
        eventually("the waiter is in the queue", async || {
            let state = Answer::to(client.get(other.url("/locks/sku-1"))).await;
            state.json()["waiters"] == length
        })
        .await;
    };
    let mut last = acquire(other, json!({})).await.json();
    let (mut doomed, mut served) = (vec![], vec![]);
    for n in 0..DOOMED {
        doomed.push(tokio::spawn(acquire(frozen, json!({ "wait_ms": 60_000 }))));
        line(2 * n + 1).await;
        served.push(tokio::spawn(acquire(other, json!({ "wait_ms": 60_000 }))));
        line(2 * n + 2).await;
    }
    frozen.signal("-STOP");
    let mut late = 0;
    for next in served {
        let released_at = Instant::now();
        release(&last).await;
        let next = timeout(super::PATIENCE, next).await;
        let next = next.expect("the waiter is not served").unwrap();
        assert_eq!(next.status, 201);
        late += u64::from(released_at.elapsed() >= turn);
        last = next.json();
    }
    assert!(
        late <= DOOMED / 2,
        "{late} waiters waited for the frozen process"
    );
    // When the process resumes, its waiters have lost their turn, and join the queue again.
    frozen.signal("-CONT");
    line(DOOMED).await;
    release(&last).await;
    while !doomed.is_empty() {
        let (woken, _, rest) = select_all(doomed).await;
        let woken = woken.unwrap();
        assert_eq!(woken.status, 201);
        assert!(woken.json()["token"].as_i64() > last["token"].as_i64());
        last = woken.json();
        release(&last).await;
        doomed = rest;
    }
}

fn text_of(file: &NamedTempFile) -> String {
    let mut text = String::new();
    file.reopen().unwrap().read_to_string(&mut text).unwrap();
    text
}

/// Returns a command for psql, connected to a database.
pub fn psql(url: &str) -> Command {
    let programs = super::postgres::programs().expect("postgresql is not installed");
    let mut command = Command::new(programs.join("psql"));
    command.args(["--no-psqlrc", "--quiet", url]);
    command
}

/// Returns the path of an example. `tests/run` builds the examples first.
pub fn binary(example: &str) -> PathBuf {
    built(&format!("examples/{example}"))
}

/// Returns the path of a file in `target/PROFILE`, the parent of the folder `deps` that contains
/// the test program.
pub fn built(name: &str) -> PathBuf {
    let test_program = std::env::current_exe().unwrap();
    let profile = test_program.parent().unwrap().parent().unwrap();
    let path = profile.join(name);
    assert!(path.exists(), "{name} is not built: use tests/run");
    path
}
