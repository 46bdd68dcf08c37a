//! Publishes VERSIONS versions of one tensor, by default a thousand, and prints the ticket that `subscribe` needs.
//!
//! `cargo run --release --example publish -- [VERSIONS] [BYTES]`
//!
//! A real producer copies its own tensors instead of calling `fill`.

use std::{convert::Infallible, error::Error, time::Duration};
use tensor_relay_server::{
    AccessStore, Config, Dtype, Identity, Keep, Listener, Server, Shape, Staged, TensorName, TensorSpec,
    Ticket, Topic, TopicOptions, Tuning,
};

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let versions: u64 = args.next().map_or(Ok(1_000), |arg| arg.parse())?;
    let bytes: u64 = args.next().map_or(Ok(64 << 10), |arg| arg.parse())?;

    // The server's identity and access rules, stored on disk so that tickets stay valid after a restart.
    let state_dir = std::env::temp_dir().join("tensor-relay-example");
    let identity = Identity::load_or_create(&state_dir)?;
    let access = AccessStore::open(&state_dir)?.watch_changes()?;
    let listener = Listener::bind("127.0.0.1:0".parse()?, &identity, Tuning::default())?;
    let server = Server::start(listener, access.clone(), Config::default());
    let topic = Topic::new("example")?;
    let address = server.local_address().to_string();
    let ticket = Ticket::new(vec![address], vec![identity.fingerprint().0], Some(topic.clone()))?;
    println!("{}", access.rules().own_ticket(ticket));

    // Up to 64 versions are kept for readers in mode `every`; a reader that is further behind makes `publish` wait for
    // a while.
    let options = TopicOptions { keep: Keep { versions: 64, ..Keep::default() }, ..TopicOptions::default() };
    let mut publisher = server.publisher_with(topic, None, options)?;
    let spec = TensorSpec::new(TensorName::new("weights")?, Dtype::U8, Shape::new(&[bytes])?);
    let mut last = None;
    for version in 1..=versions {
        let staged = Staged::new(&server.staging(), vec![spec.clone()], vec![], |_, out| {
            out.fill(version as u8);
            Ok::<_, Infallible>(())
        })?;
        let metadata = vec![("step".into(), version.to_string())];
        last = Some(publisher.publish(staged, metadata).await?);
        if version == 1 {
            // Waits until a subscriber has committed the first version, at most ten minutes.
            let publication = last.as_mut().expect("it was just published");
            publication.committed(1, Duration::from_secs(600)).await;
        }
    }
    publisher.end();
    if let Some(mut publication) = last {
        publication.committed(1, Duration::from_secs(60)).await;
        println!("{}: committed by {} subscribers", publication.id(), publication.committed_count());
    }
    server.shutdown(Duration::from_secs(8)).await;
    Ok(())
}
