//! Mirrors topics in a folder: every topic that matches a glob, now and later, becomes a file or folder there.
//!
//! `cargo run --release --example mirror -- TICKET 'models/**' FOLDER`

use std::{error::Error, path::PathBuf, sync::Arc};
use tensor_relay_client::{Client, Config, Glob, Mirror, Subscription, SubscriptionError, Ticket};
use tokio::task::JoinSet;

type Failure = Box<dyn Error + Send + Sync>;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Failure> {
    let mut args = std::env::args().skip(1);
    let (Some(ticket), Some(glob), Some(folder)) = (args.next(), args.next(), args.next()) else {
        return Err("usage: mirror TICKET GLOB FOLDER".into());
    };
    let (ticket, glob): (Ticket, Glob) = (ticket.parse()?, glob.parse()?);
    // A version replaces the previous one atomically; `Some(3)` would keep the last three.
    let mirror = Arc::new(Mirror::new(PathBuf::from(folder), None));
    let client = Client::connect(&ticket, Config::default()).await?;
    let mut topics = client.watch(&glob).await?;
    let mut following = JoinSet::new();
    loop {
        tokio::select! {
            topic = topics.next() => {
                let topic = topic.ok_or("the server is gone")?;
                let subscription = client.subscribe(&topic).await?;
                following.spawn(follow(subscription, Arc::clone(&mirror)));
            }
            Some(ended) = following.join_next() => ended??,
        }
    }
}

/// Writes each received version of one topic until the topic ends.
async fn follow(mut subscription: Subscription, mirror: Arc<Mirror>) -> Result<(), Failure> {
    loop {
        let snapshot = match subscription.next().await {
            Err(SubscriptionError::Ended { topic, reason }) => {
                println!("{topic}: {reason}");
                return Ok(());
            }
            next => next?,
        };
        let (id, mirror) = (snapshot.id().clone(), Arc::clone(&mirror));
        // Writing waits for the disk, so it is done off the executor.
        let path = tokio::task::spawn_blocking(move || mirror.save(&snapshot)).await??;
        println!("{id}: {}", path.display());
    }
}
