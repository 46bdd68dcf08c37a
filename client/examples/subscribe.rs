//! Receives every version of a topic and prints its tensors.
//!
//! `cargo run --release --example subscribe -- TICKET`

use std::{error::Error, time::Instant};
use tensor_relay_client::{Client, Config, EndReason, Request, SubscriptionError, Ticket};

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let ticket: Ticket = std::env::args().nth(1).ok_or("usage: subscribe TICKET")?.parse()?;
    let topic = ticket.topic().ok_or("the ticket names no topic")?.clone();
    // Reconnects by itself and resumes when the connection is lost. With a `device` in the config, tensors are received
    // there, and `device_tensors` returns them.
    let client = Client::connect(&ticket, Config::default()).await?;
    let mut subscription = client.subscribe_to(Request::every(topic)).await?;
    let (began, mut versions, mut bytes) = (Instant::now(), 0, 0);
    loop {
        match subscription.next().await {
            Ok(snapshot) => {
                // Complete and verified. Tensors are slices of one piece of memory, reused when the last is dropped.
                for (tensor, data) in snapshot.tensors() {
                    if versions < 3 {
                        println!("{} {} {}: {} bytes", tensor.name, tensor.dtype, tensor.shape, data.len());
                    }
                }
                versions += 1;
                bytes += snapshot.payload_bytes();
            }
            Err(SubscriptionError::Gap(gap)) => println!("{gap}"),
            Err(SubscriptionError::Ended { reason: EndReason::TopicEnded, .. }) => break,
            Err(error) => return Err(error.into()),
        }
    }
    let seconds = began.elapsed().as_secs_f64();
    println!(
        "{versions} versions in {seconds:.2} s: {:.0} a second, {:.3} GB/s",
        f64::from(versions) / seconds,
        bytes as f64 / seconds / 1e9
    );
    client.close().await;
    Ok(())
}
