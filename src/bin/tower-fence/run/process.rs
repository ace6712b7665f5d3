//! The command, as a process group of its own, or in the foreground of a terminal.

use std::{
    ffi::OsString,
    io::{self, ErrorKind, IsTerminal},
    os::unix::process::ExitStatusExt,
    process::ExitStatus,
    time::Duration,
};

use rustix::process::{
    Pid, Signal, WaitOptions, kill_process, kill_process_group, test_kill_process_group, waitpgid,
};
use tokio::{
    process::{Child, Command},
    time::{Instant, sleep},
};

use crate::failure::{self, Failure};

/// How often is looked whether a group has ended: nothing tells of it.
const LOOK: Duration = Duration::from_millis(10);
/// How long processes may take to go that were killed.
const KILLED: Duration = Duration::from_secs(2);

pub struct Process {
    child: Child,
    id: Pid,
    in_foreground: bool,
}

impl Process {
    pub fn start(command: &[OsString], environment: [(&str, String); 4]) -> Result<Self, Failure> {
        let (program, arguments) = command
            .split_first()
            .ok_or_else(|| Failure::usage("no command"))?;
        // A group in the background could not read from its terminal.
        let in_foreground = io::stdin().is_terminal();
        let mut command = Command::new(program);
        command.args(arguments).envs(environment).kill_on_drop(true);
        if !in_foreground {
            command.process_group(0);
        }
        let child = command.spawn().map_err(|error| {
            let status = match error.kind() {
                ErrorKind::NotFound => failure::NOT_FOUND,
                _ => failure::NOT_EXECUTABLE,
            };
            Failure::new(status, format!("{}: {error}", program.to_string_lossy()))
        })?;
        let id = child.id().and_then(|id| Pid::from_raw(id as i32));
        let id = id.ok_or_else(|| Failure::other("the command has no process id"))?;
        Ok(Self {
            child,
            id,
            in_foreground,
        })
    }

    /// Whether it has no process group of its own.
    pub const fn is_in_foreground(&self) -> bool {
        self.in_foreground
    }

    /// Waits for the end of the command, and returns its exit status as shells do.
    pub async fn wait(&mut self) -> Result<u8, Failure> {
        let status = self.child.wait().await;
        let status = status.map_err(|error| Failure::other(format!("the command: {error}")))?;
        Ok(number(status))
    }

    /// Passes a signal on. In the foreground, the terminal has sent some already.
    pub fn pass_on(&self, signal: Signal) {
        if !(self.in_foreground && matches!(signal, Signal::INT | Signal::QUIT)) {
            self.send(signal);
        }
    }

    /// Ends the command and its group: TERM, and KILL for what is still there after `grace`.
    pub async fn stop(&mut self, grace: Duration) {
        if self.is_gone() {
            return;
        }
        self.send(Signal::TERM);
        // What was stopped has to go on to end.
        self.send(Signal::CONT);
        if !self.is_gone_within(grace).await {
            self.send(Signal::KILL);
            self.is_gone_within(KILLED).await;
        }
    }

    async fn is_gone_within(&mut self, limit: Duration) -> bool {
        let began = Instant::now();
        while !self.is_gone() {
            if began.elapsed() >= limit {
                return false;
            }
            sleep(LOOK).await;
        }
        true
    }

    /// Whether the command has ended, and nothing of its group is left.
    fn is_gone(&mut self) -> bool {
        let ended = !matches!(self.child.try_wait(), Ok(None));
        if !ended || self.in_foreground {
            return ended;
        }
        // Where this is the first process of a container, what the command has left becomes its own.
        while let Ok(Some(_)) = waitpgid(self.id, WaitOptions::NOHANG) {}
        test_kill_process_group(self.id).is_err()
    }

    /// Sends a signal. Who is gone does not get it.
    fn send(&self, signal: Signal) {
        _ = match self.in_foreground {
            true => kill_process(self.id, signal),
            false => kill_process_group(self.id, signal),
        };
    }
}

/// What a shell makes of the end of a command.
fn number(status: ExitStatus) -> u8 {
    match (status.code(), status.signal()) {
        (Some(code), _) => code as u8,
        (None, Some(signal)) => 128 + signal as u8,
        (None, None) => 1,
    }
}
