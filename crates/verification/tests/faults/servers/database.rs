//! Postgres at a fixed address, which stays the same after a failover to another server.

use std::{fs, path::Path, time::Duration};

use sqlx::{Connection, PgConnection};
use tokio::time::{sleep, timeout};
use tower_fence::Fence;

use crate::{
    clients::TTL,
    history::{Failover, now},
    plan::{Fault, Planned},
    support::{
        postgres::PostgresServer,
        process::{family, send_signal, try_signal},
        proxy::{Link, Proxy},
        standby::{Replication, Standby},
        wall_clock::{is_wrong, off_by},
    },
    tables::{FENCED, UNFENCED},
};

/// Terminates random sessions of clients, except the session that executes the statement.
const TERMINATE: &str = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity \
    WHERE backend_type = 'client backend' AND pid <> pg_backend_pid() AND random() < 0.5";
/// Cancels the statements of random sessions, except the session that executes this statement.
const CANCEL: &str = "SELECT pg_cancel_backend(pid) FROM pg_stat_activity \
    WHERE backend_type = 'client backend' AND pid <> pg_backend_pid() AND random() < 0.8";

/// Breaks all held leases.
const BREAK: &str = "SELECT tower_fence.break_lease(resource) FROM tower_fence.leases";

pub struct Database {
    primary: PostgresServer,
    pub failovers: Vec<Failover>,
}

impl Database {
    /// Starts a server with the tables of the fence and of the services. Returns the server and its
    /// address.
    pub async fn start() -> (Self, Proxy) {
        // A killed process loses no data that it has passed to the operating system, so fsync is
        // not needed. The small log keeps the creation of a new standby fast.
        let settings = [
            "fsync=off",
            "max_connections=200",
            "checkpoint_timeout=30s",
            "max_wal_size=256MB",
        ];
        let primary = PostgresServer::start(&settings).await;
        let address = Proxy::to(primary.addr()).await;
        let url = primary.url("postgres");
        let pool = sqlx::PgPool::connect(&url).await.unwrap();
        Fence::new(pool.clone()).migrate().await.unwrap();
        let mut conn = pool.acquire().await.unwrap();
        for tables in [FENCED, UNFENCED] {
            tables.create(&mut conn).await.unwrap();
        }
        let failovers = vec![];
        (Self { primary, failovers }, address)
    }

    /// Connects directly to the server, not through the address that faults disturb.
    pub async fn connect(&self) -> PgConnection {
        self.primary.connect().await
    }

    pub fn url(&self, address: &Proxy) -> String {
        address.url(&self.primary.url("postgres"))
    }

    /// Tries to run a statement. Returns whether it succeeded.
    async fn try_execute(&self, sql: &'static str) -> bool {
        let url = self.primary.url("postgres");
        let run = async {
            let mut conn = PgConnection::connect(&url).await?;
            sqlx::raw_sql(sql).execute(&mut conn).await?;
            conn.close().await
        };
        matches!(timeout(Duration::from_secs(5), run).await, Ok(Ok(())))
    }

    /// Kills or stops the server, and starts it again after `away`.
    pub async fn restart(&mut self, at_once: bool, away: Duration) {
        match at_once {
            true => self.primary.crash().await,
            false => self.primary.stop().await,
        }
        sleep(away).await;
        self.primary.restart().await;
    }

    /// Executes a fault. Returns false if it did not happen.
    pub async fn suffer(&mut self, planned: Planned, address: &Proxy) -> bool {
        use Fault::*;
        let Planned {
            fault,
            lasts,
            choice,
        } = planned;
        match fault {
            PostgresFrozen => {
                let processes = self.processes();
                self.signal(&processes, "-STOP");
                sleep(lasts).await;
                self.signal(&processes, "-CONT");
            }
            PostgresKilled => self.restart(true, lasts).await,
            PostgresRestarted => self.restart(false, lasts).await,
            PostgresClockJumps => {
                // The jump is shorter than the retention of idempotency keys.
                let jump = ["+1h", "-1h", "-3s"][choice % 3];
                return self.run_with_clock(jump, lasts).await;
            }
            BackendFrozen => {
                let Some(pid) = self.signal_one_backend(choice, "-STOP") else {
                    return false;
                };
                sleep(TTL / 2 + lasts).await;
                self.signal(&[pid], "-CONT");
            }
            // The server then ends all other such processes and recovers.
            BackendKilled => {
                let is_killed = self.signal_one_backend(choice, "-KILL").is_some();
                self.recover().await;
                return is_killed;
            }
            BackendsTerminated => return self.try_execute(TERMINATE).await,
            BackendsCanceled => return self.try_execute(CANCEL).await,
            Checkpoint => return self.try_execute("CHECKPOINT").await,
            // Files cannot grow. A server that cannot write its log shuts down.
            NoSpace => {
                // A segment of the log has 16 MB, and most tables are smaller than this limit.
                let is_limited = self.limit_files("1048576:unlimited");
                sleep(lasts).await;
                self.limit_files("unlimited:unlimited");
                self.recover().await;
                return is_limited;
            }
            FailoverSynchronous => self.fail_over(address, false, lasts / 4).await,
            FailoverAsynchronous => self.fail_over(address, true, lasts / 4).await,
            other => unreachable!("{other:?} is not a fault of Postgres"),
        }
        true
    }

    /// Runs the server with a wrong wall clock. The server is stopped to set the clock, and killed
    /// to reset it. Returns whether the clock was wrong.
    async fn run_with_clock(&mut self, offset: &str, lasts: Duration) -> bool {
        self.primary.set_variables(off_by(offset));
        self.restart(false, Duration::ZERO).await;
        let time = sqlx::query_scalar("SELECT extract(epoch FROM clock_timestamp())::bigint");
        let time = time.fetch_one(&mut self.connect().await).await;
        let is_wrong = is_wrong(time.ok());
        sleep(TTL / 2 + lasts).await;
        self.primary.set_variables(vec![]);
        self.restart(true, Duration::ZERO).await;
        // Leases that were granted while the clock was ahead expire only after an hour. Break these
        // leases, so that clients can write to the resources.
        if offset.starts_with('+') {
            for _ in 0..5 {
                if self.try_execute(BREAK).await {
                    break;
                }
            }
        }
        is_wrong
    }

    fn signal_one_backend(&self, choice: usize, signal: &str) -> Option<u32> {
        let processes = self.processes();
        let backends: Vec<_> = processes.into_iter().filter(|pid| serves(*pid)).collect();
        let pid = *backends.get(choice % backends.len().max(1))?;
        try_signal(pid, signal).then_some(pid)
    }

    /// Limits the size of files. Returns whether the limit applies at least to the main process.
    fn limit_files(&self, limit: &str) -> bool {
        let limited = self.processes().into_iter().map(|pid| {
            let arguments = ["--pid", &pid.to_string(), &format!("--fsize={limit}")];
            // In some environments, not even root may limit processes of another user.
            let mut prlimit = self.primary.command(Path::new("prlimit"));
            let limited = prlimit.args(arguments).output();
            limited.is_ok_and(|limited| limited.status.success())
        });
        let limited: Vec<_> = limited.collect();
        limited.first() == Some(&true)
    }

    /// Waits until the server answers, and restarts it if it does not.
    async fn recover(&mut self) {
        let url = self.primary.url("postgres");
        for _ in 0..50 {
            if let Ok(Ok(conn)) = timeout(Duration::from_secs(1), PgConnection::connect(&url)).await
            {
                let _ = conn.close().await;
                return;
            }
            sleep(Duration::from_millis(100)).await;
        }
        self.primary.crash().await;
        self.primary.restart().await;
    }

    /// Creates a standby, and replaces the server with it after a while.
    async fn fail_over(&mut self, address: &Proxy, loses: bool, lasts: Duration) {
        let replication = match loses {
            true => Replication::Asynchronous,
            false => Replication::Synchronous,
        };
        let standby = Standby::of(&self.primary, replication).await;
        sleep(lasts).await;
        let from = now();
        if loses {
            standby.catch_up(&self.primary).await;
            standby.hold_back();
            sleep(lasts).await;
        }
        self.primary.crash().await;
        let crashed = now();
        address.set(Link::Cut);
        self.primary = standby.promote().await;
        address.switch_to(self.primary.addr());
        let until = now();
        self.failovers.push(Failover {
            loses,
            from,
            crashed,
            until,
        });
    }

    /// Returns the processes of the server, with the main process first.
    fn processes(&self) -> Vec<u32> {
        family(self.primary.id())
    }

    fn signal(&self, processes: &[u32], signal: &str) {
        for &pid in processes {
            if pid == self.primary.id() {
                send_signal(pid, signal);
            } else {
                // A process that serves a connection may have ended.
                try_signal(pid, signal);
            }
        }
    }
}

/// Whether a process serves a TCP connection. If so, its title contains the address of the client.
fn serves(pid: u32) -> bool {
    let title = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    String::from_utf8_lossy(&title).contains(" 127.0.0.1(")
}
