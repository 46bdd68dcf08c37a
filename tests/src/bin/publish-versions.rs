//! Publishes small versions from memory at the pace of readers in mode `every`: `publish-versions COUNT STATE_DIR`.
//!
//! It reports its address as `tensor-relay serve --json` does. It publishes the first version immediately, so that
//! readers can join, and the others after a line on stdin. It reports when all are published, and exits when stdin
//! closes. No reader is evicted: publishing waits for room.

#![forbid(unsafe_code)]
#![expect(clippy::unwrap_used, reason = "a producer that cannot continue has failed its test")]

use serde_json::json;
use std::{io::stdin, net::Ipv4Addr, ops::RangeInclusive, path::Path, time::Instant};
use tensor_relay_protocol::{Dtype, Ticket, Topic};
use tensor_relay_server::{
    Access, Config, Identity, Keep, Listener, Publisher, Server, TopicOptions, Tuning, WhenFull,
};
use tensor_relay_tests::tensors;

/// The number of retained versions: few, so that readers wait for the producer and the producer waits for readers.
const KEEP: u32 = 16;

/// The size of a version, as of a step counter and a few scalars.
const BYTES: u64 = 64;

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let [_, count, state_dir] = &arguments[..] else { panic!("publish-versions COUNT STATE_DIR") };
    let identity = Identity::load_or_create(Path::new(state_dir)).unwrap();
    let any_port = (Ipv4Addr::LOCALHOST, 0).into();
    let listener = Listener::bind(any_port, &identity, Tuning::default()).unwrap();
    let server = Server::start(listener, Access::open(), Config::default());
    let topic = Topic::new("counter").unwrap();
    let options = TopicOptions {
        keep: Keep { versions: KEEP, ..Keep::default() },
        when_full: WhenFull::Block,
        ..TopicOptions::default()
    };
    let mut publisher = server.publisher_with(topic.clone(), None, options).unwrap();
    let listen = server.local_address();
    let ticket = Ticket::new(vec![listen.to_string()], vec![identity.fingerprint().0], Some(topic)).unwrap();
    let entry =
        json!({"topic": "counter", "epoch": publisher.epoch().to_string(), "ticket": ticket.to_string()});
    let key = identity.fingerprint().to_string();
    println!("{}", json!({"event": "serving", "listen": listen.to_string(), "key": key, "topics": [entry]}));
    publish(&server, &mut publisher, 1..=1).await;
    read_line().await;
    let began = Instant::now();
    publish(&server, &mut publisher, 2..=count.parse().unwrap()).await;
    println!("{}", json!({"event": "published", "duration_s": began.elapsed().as_secs_f64()}));
    while read_line().await {}
}

async fn publish(server: &Server, publisher: &mut Publisher, versions: RangeInclusive<u64>) {
    for version in versions {
        let staged = tensors::stage(server, vec![tensors::spec("counter", Dtype::U8, BYTES)], version);
        publisher.publish(staged, tensors::metadata(version)).await.unwrap();
    }
}

/// Whether there was another line on stdin.
async fn read_line() -> bool {
    let read = tokio::task::spawn_blocking(|| stdin().read_line(&mut String::new()));
    read.await.unwrap().unwrap() > 0
}
