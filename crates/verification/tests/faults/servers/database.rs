//! Postgres at a fixed address, which stays the same after a failover to another server.

use std::{fs, path::Path, time::Duration};

use sqlx::{Connection, PgConnection};
use tokio::time::{sleep, timeout};
use tower_fence::Fence;

use crate::{
    history::{Failover, now},
    support::{
        postgres::PostgresServer,
        process::{family, send_signal, try_signal},
        proxy::{Link, Proxy},
        standby::{Replication, Standby},
        wall_clock::{is_wrong, off_by},
    },
    tables::{FENCED, UNFENCED},
};

pub struct Database {
    primary: PostgresServer,
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
        (Self { primary }, address)
    }

    /// Connects directly to the server, not through the address that faults disturb.
    pub async fn connect(&self) -> PgConnection {
        self.primary.connect().await
    }

    pub fn url(&self, address: &Proxy) -> String {
        address.url(&self.primary.url("postgres"))
    }

    /// Tries to run a statement. Returns whether it succeeded.
    pub async fn try_execute(&self, sql: &'static str) -> bool {
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

    /// Runs the server with a wrong wall clock. The server is stopped to set the clock, and killed
    /// to reset it. Returns whether the clock was wrong.
    pub async fn run_with_clock(&mut self, offset: &str, length: Duration) -> bool {
        self.primary.set_variables(off_by(offset));
        self.restart(false, Duration::ZERO).await;
        let time = sqlx::query_scalar("SELECT extract(epoch FROM clock_timestamp())::bigint");
        let time = time.fetch_one(&mut self.connect().await).await;
        let is_wrong = is_wrong(time.ok());
        sleep(length).await;
        self.primary.set_variables(vec![]);
        self.restart(true, Duration::ZERO).await;
        is_wrong
    }

    /// Freezes all processes of the server for this time.
    pub async fn freeze(&self, length: Duration) {
        let processes = self.processes();
        self.signal(&processes, "-STOP");
        sleep(length).await;
        self.signal(&processes, "-CONT");
    }

    /// Kills one process that serves a connection. The server then ends all other such processes
    /// and recovers.
    pub async fn kill_one_backend(&mut self, choice: usize) -> bool {
        let is_killed = self.signal_one_backend(choice, "-KILL").is_some();
        self.recover().await;
        is_killed
    }

    /// Freezes one process that serves a connection for this time.
    pub async fn freeze_one_backend(&self, choice: usize, length: Duration) -> bool {
        let Some(pid) = self.signal_one_backend(choice, "-STOP") else {
            return false;
        };
        sleep(length).await;
        self.signal(&[pid], "-CONT");
        true
    }

    fn signal_one_backend(&self, choice: usize, signal: &str) -> Option<u32> {
        let processes = self.processes();
        let backends: Vec<_> = processes.into_iter().filter(|pid| serves(*pid)).collect();
        let pid = *backends.get(choice % backends.len().max(1))?;
        try_signal(pid, signal).then_some(pid)
    }

    /// Prevents files from growing for this time. A server that cannot write its log shuts down.
    pub async fn no_space(&mut self, length: Duration) -> bool {
        // A segment of the log has 16 MB, and most tables are smaller than this limit.
        let is_limited = self.limit_files("1048576:unlimited");
        sleep(length).await;
        self.limit_files("unlimited:unlimited");
        self.recover().await;
        is_limited
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
    pub async fn fail_over(
        &mut self,
        address: &Proxy,
        replication: Replication,
        lasts: Duration,
    ) -> Failover {
        let standby = Standby::of(&self.primary, replication).await;
        sleep(lasts).await;
        let from = now();
        if replication == Replication::Asynchronous {
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
        Failover {
            loses: replication == Replication::Asynchronous,
            from,
            crashed,
            until,
        }
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
