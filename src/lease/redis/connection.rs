//! Connections to one server or to a cluster, which look the same from above.

use redis::{
    Cmd, FromRedisValue, Pipeline, RedisFuture, RedisResult, Value,
    aio::{ConnectionLike, MultiplexedConnection},
    cluster_async::ClusterConnection,
    cluster_routing::{Route, RoutingInfo, SingleNodeRoutingInfo, SlotAddr},
};

/// A connection for commands. Clones share it.
#[derive(Clone)]
pub(super) enum Connection {
    Node(MultiplexedConnection),
    Cluster(ClusterConnection),
}

impl ConnectionLike for Connection {
    fn req_packed_command<'a>(&'a mut self, cmd: &'a Cmd) -> RedisFuture<'a, Value> {
        match self {
            Self::Node(connection) => connection.req_packed_command(cmd),
            Self::Cluster(connection) => connection.req_packed_command(cmd),
        }
    }

    fn req_packed_commands<'a>(
        &'a mut self,
        pipeline: &'a Pipeline,
        offset: usize,
        count: usize,
    ) -> RedisFuture<'a, Vec<Value>> {
        match self {
            Self::Node(connection) => connection.req_packed_commands(pipeline, offset, count),
            Self::Cluster(connection) => connection.req_packed_commands(pipeline, offset, count),
        }
    }

    fn get_db(&self) -> i64 {
        match self {
            Self::Node(connection) => connection.get_db(),
            Self::Cluster(connection) => connection.get_db(),
        }
    }
}

impl Connection {
    /// The servers that share the keys among them, each by the first of its slots.
    pub(super) async fn shards(&mut self) -> RedisResult<Vec<u16>> {
        let Self::Cluster(connection) = self else {
            return Ok(vec![0]);
        };
        // Of each range: the first slot, the last one, the master, its replicas.
        let slots = redis::cmd("CLUSTER").arg("SLOTS").take();
        let mut ranges = vec![];
        for range in slots.query_async::<Vec<Vec<Value>>>(connection).await? {
            if let [first, _, master, ..] = &range[..] {
                ranges.push((redis::from_redis_value_ref::<u16>(first)?, master.clone()));
            }
        }
        ranges.sort_unstable_by_key(|(first, _)| *first);
        let (mut shards, mut masters) = (vec![], vec![]);
        for (first, master) in ranges {
            if !masters.contains(&master) {
                shards.push(first);
                masters.push(master);
            }
        }
        Ok(shards)
    }

    /// Asks the server that has a slot.
    pub(super) async fn ask_shard<T: FromRedisValue>(
        &mut self,
        slot: u16,
        command: &Cmd,
    ) -> RedisResult<T> {
        let Self::Cluster(connection) = self else {
            return command.query_async(self).await;
        };
        let route = SingleNodeRoutingInfo::SpecificNode(Route::new(slot, SlotAddr::Master));
        let answer = connection.route_command(command.clone(), RoutingInfo::SingleNode(route));
        Ok(redis::from_redis_value(answer.await?.extract_error()?)?)
    }
}

/// A connection that subscribes to channels. Clones share it.
#[derive(Clone)]
pub(super) enum Subscriber {
    Node(MultiplexedConnection),
    Cluster(ClusterConnection),
}

impl Subscriber {
    /// Whether there are other servers behind it that go on while one of them is silent.
    pub(super) const fn has_many_servers(&self) -> bool {
        matches!(self, Self::Cluster(_))
    }

    /// Subscribes to channels of one slot, on the server that has it. To subscribe again changes
    /// nothing, and is answered.
    pub(super) async fn subscribe(&self, channels: &[String]) -> RedisResult<()> {
        match self.clone() {
            Self::Node(mut connection) => connection.subscribe(channels).await,
            Self::Cluster(mut connection) => {
                // A master that has become a replica goes on to take subscriptions, though SPUBLISH
                // on the new one does not count them. Only who asks for a key is sent on.
                if let Some(same_slot) = channels.first() {
                    let exists = redis::cmd("EXISTS").arg(same_slot).take();
                    exists.query_async::<()>(&mut connection).await?;
                }
                connection.ssubscribe(channels).await
            }
        }
    }
}
