//! The process of the command. It has its own process group, except in the foreground of a
//! terminal, where it is in the group of this process.

use std::{
    ffi::OsString,
    io::{self, ErrorKind},
    os::unix::process::CommandExt,
    process::Command,
    time::Duration,
};

use rustix::{
    process::{
        Pid, Signal, WaitOptions, WaitStatus, getpgrp, getpid, getsid, kill_process,
        kill_process_group, wait,
    },
    termios::{tcgetpgrp, tcsetpgrp},
};
use tokio::time::{Instant, sleep};

use super::{
    alive::{self, Alive, Inherited},
    signals::{Heard, Signals},
};
use crate::{
    failure::{self, Failure},
    logs,
};

/// First pause between two checks of the processes. The pauses grow up to [`LONGEST_PAUSE`]. The
/// processes must be polled, because the system does not report the end of all of them.
const FIRST_PAUSE: Duration = Duration::from_millis(10);
const LONGEST_PAUSE: Duration = Duration::from_millis(200);
/// How long killed processes may take to end.
const KILLED: Duration = Duration::from_secs(2);
/// How long a command may take to suspend after TSTP.
const STOPPED: Duration = Duration::from_secs(1);

pub struct Process {
    id: Pid,
    group: Group,
    inherited: Inherited,
    /// Whether the command and its group have ended. The system may then reuse their id.
    is_group_gone: bool,
    /// The exit status of the command, once it has ended.
    status: Option<u8>,
    /// Whether INT or TERM has asked the command to end. This program forwards the signals that it
    /// receives. In a terminal of its own, the command receives INT directly.
    is_asked_to_end: bool,
    /// Whether the log has reported that the terminal has stopped the command.
    is_stop_reported: bool,
}

/// The process group of the command.
#[derive(Clone, Copy, PartialEq)]
enum Group {
    /// The command has its own process group.
    Own,
    /// The command has its own process group, which is put into the foreground of the terminal.
    /// This process leads the session of the terminal, as in a container.
    OwnTerminal,
    /// The command is in the process group of this process, which is in the foreground of a
    /// terminal.
    Foreground,
}

/// Makes this process the parent of each process of the command whose own parent has ended, so that
/// this process can read its status. Process 1 adopts such processes without this call.
pub fn adopt_orphans() {
    #[cfg(target_os = "linux")]
    {
        _ = rustix::process::set_child_subreaper(Some(getpid()));
    }
}

/// Reads the status of each child that has ended or was stopped.
pub fn reap(mut read: impl FnMut(Pid, WaitStatus)) {
    while let Ok(Some((id, status))) = wait(WaitOptions::NOHANG | WaitOptions::UNTRACED) {
        read(id, status);
    }
}

impl Process {
    pub fn start(command: &[OsString], environment: [(&str, String); 3]) -> Result<Self, Failure> {
        let (program, arguments) = command
            .split_first()
            .ok_or_else(|| Failure::usage("no command"))?;
        let group = Group::here();
        let mut command = Command::new(program);
        command.args(arguments).envs(environment);
        if group != Group::Foreground {
            command.process_group(0);
        }
        let inherited = Inherited::now();
        let child = command.spawn().map_err(|error| {
            let status = match error.kind() {
                ErrorKind::NotFound => failure::NOT_FOUND,
                _ => failure::NOT_EXECUTABLE,
            };
            Failure::new(status, format!("{}: {error}", program.to_string_lossy()))
        })?;
        let id = Pid::from_child(&child);
        let process = Self {
            id,
            group,
            inherited,
            is_group_gone: false,
            status: None,
            is_asked_to_end: false,
            is_stop_reported: false,
        };
        if group == Group::OwnTerminal {
            _ = tcsetpgrp(io::stdin(), process.id);
            // If the command read from the terminal before it was in the foreground, it was
            // stopped.
            process.send(Signal::CONT);
        }
        Ok(process)
    }

    /// Returns whether the command has no process group of its own.
    pub fn is_in_foreground(&self) -> bool {
        self.group == Group::Foreground
    }

    /// Returns the exit status that a shell would report for the command; `None` while the command
    /// runs. Also reads the status of each orphan.
    pub fn status(&mut self) -> Option<u8> {
        reap(|id, status| match status.stopping_signal() {
            _ if id != self.id || self.status.is_some() => {}
            None => {
                // Ctrl-C has reached only the command, because its group has the terminal.
                self.is_asked_to_end |= self.group == Group::OwnTerminal
                    && number(status) == 128 + Signal::INT.as_raw() as u8;
                self.status = Some(number(status));
            }
            // After Ctrl-Z, there is no shell that could continue the command.
            Some(stopped)
                if stopped == Signal::TSTP.as_raw() && self.group == Group::OwnTerminal =>
            {
                self.send(Signal::CONT);
            }
            // The terminal sends these signals to a process that uses it in the background.
            Some(stopped)
                if !self.is_stop_reported
                    && [Signal::TTIN, Signal::TTOU]
                        .map(Signal::as_raw)
                        .contains(&stopped) =>
            {
                self.is_stop_reported = true;
                logs::report(
                    "the command is stopped, because it uses the terminal in the background; the lease \
                     is kept",
                );
            }
            Some(_) => {}
        });
        self.status
    }

    /// Returns whether INT or TERM has asked the command to end.
    pub fn is_asked_to_end(&self) -> bool {
        self.is_asked_to_end
    }

    /// Forwards a signal to the command and its group, unless the terminal has sent it to the
    /// command as well. The command decides what happens to its processes outside the group.
    pub fn pass_on(&mut self, heard: Heard) {
        self.is_asked_to_end |= matches!(heard.signal, Signal::INT | Signal::TERM);
        if self.has_got(heard) {
            return;
        }
        self.send(heard.signal);
        // A stopped process handles the signal only after it continues. In the foreground, the
        // shell of the terminal continues its jobs.
        if heard.is_interrupt() && !self.is_in_foreground() {
            self.send(Signal::CONT);
        }
    }

    fn has_got(&self, heard: Heard) -> bool {
        self.is_in_foreground()
            && heard.by_terminal
            && matches!(heard.signal, Signal::INT | Signal::QUIT | Signal::TSTP)
    }

    /// Terminates the processes of the command: TERM, then KILL for each process that is alive
    /// after `grace`. Forwards the signals that arrive in the meantime, except for TSTP. Returns
    /// whether all processes have ended.
    pub async fn stop(&mut self, grace: Duration, signals: &mut Signals) -> bool {
        if self.alive().is_none() {
            return true;
        }
        self.send_to_all(Signal::TERM);
        // A stopped process handles TERM only after it continues.
        self.send_to_all(Signal::CONT);
        let began = Instant::now();
        loop {
            let left = grace.saturating_sub(began.elapsed());
            tokio::select! {
                is_gone = self.comes_true(left, Self::is_gone) => match is_gone {
                    true => return true,
                    false => break,
                },
                heard = signals.next() => match heard.signal {
                    Signal::CHILD | Signal::TSTP => {}
                    _ => {
                        // After the end of the command, the signal is for this process.
                        self.is_asked_to_end |= self.status.is_some() && heard.is_interrupt();
                        self.pass_on(heard);
                    }
                },
            }
        }
        // A process may start another one before it is killed.
        let is_gone = |process: &mut Self| {
            process.kill();
            process.is_gone()
        };
        self.comes_true(KILLED, is_gone).await
    }

    /// Suspends the processes of the command with the received signal, and with STOP if that has no
    /// effect.
    pub async fn pause(&mut self, heard: Heard) {
        self.pass_on(heard);
        self.send_outside(heard.signal);
        if !self.comes_true(STOPPED, Self::is_stopped).await {
            self.send_to_all(Signal::STOP);
            self.comes_true(STOPPED, Self::is_stopped).await;
        }
    }

    /// Continues the command after [`pause`](Self::pause).
    pub fn resume(&self) {
        self.send_to_all(Signal::CONT);
    }

    /// Kills the processes of the command that accept the signal.
    pub fn kill(&self) {
        self.send_to_all(Signal::KILL);
    }

    /// Returns the processes of the command that are alive; `None` if all have ended.
    pub fn alive(&mut self) -> Option<Alive> {
        let has_ended = self.status().is_some();
        self.is_group_gone |= has_ended && alive::is_empty(self.id);
        match self.group {
            Group::Foreground if has_ended => None,
            Group::Foreground => Some(Alive::process(self.id)),
            _ => self.all_alive(),
        }
    }

    /// Like [`alive`](Self::alive), for a command that is not in the foreground.
    fn all_alive(&self) -> Option<Alive> {
        let group = (!self.is_group_gone).then_some(self.id);
        Alive::of_command(group, &self.inherited)
    }

    fn is_gone(&mut self) -> bool {
        self.alive().is_none()
    }

    fn is_stopped(&mut self) -> bool {
        self.alive().is_none_or(|alive| alive.is_stopped())
    }

    async fn comes_true(
        &mut self,
        limit: Duration,
        mut is_true: impl FnMut(&mut Self) -> bool,
    ) -> bool {
        let began = Instant::now();
        let mut pause = FIRST_PAUSE;
        while !is_true(self) {
            let left = limit.saturating_sub(began.elapsed());
            if left.is_zero() {
                return false;
            }
            sleep(pause.min(left)).await;
            pause = (2 * pause).min(LONGEST_PAUSE);
        }
        true
    }

    /// Sends a signal to the group of the command. In the foreground, only the command itself
    /// receives the signal.
    fn send(&self, signal: Signal) {
        _ = match self.group {
            Group::Foreground if self.status.is_some() => Ok(()),
            Group::Foreground => kill_process(self.id, signal),
            _ if self.is_group_gone => Ok(()),
            _ => kill_process_group(self.id, signal),
        };
    }

    /// Sends a signal to all processes of the command. In the foreground, sends it only to the
    /// command.
    fn send_to_all(&self, signal: Signal) {
        self.send(signal);
        self.send_outside(signal);
    }

    /// Sends a signal to the processes that the command has started, and that have left its group.
    fn send_outside(&self, signal: Signal) {
        if self.is_in_foreground() {
            return;
        }
        if let Some(alive) = self.all_alive() {
            for process in alive.outside(self.id) {
                _ = kill_process(process, signal);
            }
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if self.status.is_none() {
            self.kill();
        }
    }
}

impl Group {
    /// Selects the process group of a command. If this process is in the foreground of the terminal
    /// at standard input, so is the command. In the background, it could not read from the
    /// terminal.
    fn here() -> Self {
        match tcgetpgrp(io::stdin()) {
            Ok(group) if group == getpgrp() => match getsid(None) {
                // This process leads the session, so no shell needs the terminal afterwards.
                Ok(leader) if leader == getpid() => Self::OwnTerminal,
                _ => Self::Foreground,
            },
            _ => Self::Own,
        }
    }
}

/// Returns the exit status that a shell would report for a command.
fn number(ended: WaitStatus) -> u8 {
    match (ended.exit_status(), ended.terminating_signal()) {
        (Some(code), _) => code as u8,
        (None, Some(signal)) => 128 + signal as u8,
        (None, None) => 1,
    }
}
