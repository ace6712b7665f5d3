//! The three services. Each is a process behind its own proxy.

use std::{env, net::SocketAddr, process::Command};

use tokio::{sync::Mutex, time::sleep};

use super::{disturb, freeze, jumps, leases::LeaseServers};
use crate::{
    plan::{Fault, Planned},
    service::Settings,
    support::{ports::free_port, process::Process, proxy::Proxy, wall_clock::WallClock},
};

pub struct Service {
    settings: String,
    variables: Vec<(String, String)>,
    process: Option<Process>,
}

pub struct Services {
    pub services: Vec<Mutex<Service>>,
    /// The proxies through which clients reach the services.
    links: Vec<Proxy>,
    /// The wall clock of the first service.
    clock: WallClock,
    /// The URL at which the first service returns its time.
    time_url: String,
}

impl Services {
    /// Starts the services on a database with a pooler in front of it. The first has default
    /// settings, the second reuses connections from write to write, and the third connects through
    /// the pooler.
    pub async fn start(database: &str, pooler: &str, leases: &LeaseServers) -> Self {
        let clock = WallClock::right();
        let addrs = [(); 3].map(|()| SocketAddr::from(([127, 0, 0, 1], free_port())));
        let (mut services, mut links) = (vec![], vec![]);
        for (n, addr) in addrs.into_iter().enumerate() {
            let settings = Settings {
                addr,
                database: if n == 2 { pooler } else { database }.to_owned(),
                direct: database.to_owned(),
                reuses: n == 1,
                store: leases.store.to_owned(),
                store_urls: leases.urls.clone(),
            };
            let owned = |(name, value): (&str, &str)| (name.to_owned(), value.to_owned());
            let mut service = Service {
                settings: serde_json::to_string(&settings).unwrap(),
                variables: match n {
                    0 => clock.variables().map(owned).into(),
                    _ => vec![],
                },
                process: None,
            };
            service.start().await;
            services.push(Mutex::new(service));
            links.push(Proxy::to(addr).await);
        }
        Self {
            services,
            links,
            clock,
            time_url: format!("http://{}/time", addrs[0]),
        }
    }

    /// Executes a fault. Returns false if it did not happen.
    pub async fn suffer(&self, planned: Planned) -> bool {
        let n = planned.choice % self.services.len();
        if planned.fault == Fault::ServiceClockJumps {
            let jump = ["+1d", "-1d", "+30y", "-3s"][planned.choice % 4];
            return jumps(&self.clock, jump, self.time(), planned.lasts).await;
        }
        let mut service = self.services[n].lock().await;
        match planned.fault {
            Fault::ServiceFrozen => freeze(|signal| service.signal(signal), planned.lasts).await,
            Fault::ServiceKilled => {
                service.kill();
                sleep(planned.lasts).await;
                service.start().await;
            }
            _ => disturb(&self.links[n], planned).await,
        }
        true
    }

    /// Reads the clock of the first service, in seconds.
    async fn time(&self) -> Option<i64> {
        let asked = reqwest::get(&self.time_url).await.ok()?;
        asked.text().await.ok()?.parse().ok()
    }

    pub fn urls(&self) -> Vec<String> {
        self.links
            .iter()
            .map(|link| format!("http://{}", link.addr))
            .collect()
    }
}

impl Service {
    pub async fn start(&mut self) {
        let mut command = Command::new(env::current_exe().unwrap());
        command.args(["service", &self.settings]);
        command.envs(self.variables.iter().cloned());
        let mut process = Process::run(command);
        process.prints("listens", 1).await;
        self.process = Some(process);
    }

    /// Kills the process with SIGKILL.
    pub fn kill(&mut self) {
        self.process = None;
    }

    fn signal(&self, signal: &str) {
        let process = self.process.as_ref();
        process.expect("the service is running").signal(signal);
    }
}
