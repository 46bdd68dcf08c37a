//! tensor-relay as a contender.
//!
//! A round is a subscription: from the request to the verified commit of the whole payload, into memory that earlier
//! rounds have used. Bytes are noise, encryption and hashes are on, nothing is compressed.

mod small;
mod ticket_file;

use crate::{
    contender::{Begun, Ready, ReceiveArgs, Received, Sent, ServeArgs, print},
    noise,
};
use anyhow::{Result, ensure};
use small::SmallPublisher;
use std::{convert::Infallible, time::Duration};
use tensor_relay_client::{Client, Connector, Lanes, Ticket, Topic, Tuning};
use tensor_relay_server::{
    Config, Dtype, Identity, Listener, Publication, Server, Shape, Staged, TensorName, TensorSpec,
    TopicOptions,
};
use ticket_file::TicketFile;

const TOPIC: &str = "bulk";

/// How long a round may take before the serving side takes its receiver for dead.
const ROUND_MAX: Duration = Duration::from_secs(600);

/// Publishes noise, cut into so many `tensors`, and sends it to whoever subscribes.
///
/// # Errors
/// When the address is taken or there is no memory.
pub async fn serve(args: ServeArgs, tensors: u32) -> Result<()> {
    let identity = Identity::ephemeral()?;
    let listener = Listener::bind(args.listen, &identity, tuning(args.mtu))?;
    let server = Server::start(listener, Config::default());
    let address = server.local_address()?;
    let ticket = Ticket::new(vec![address.to_string()], vec![identity.fingerprint().0], None)?;
    let mut publication = publish(&server, args.bytes, tensors).await?;
    let _ticket = TicketFile::leave(address.port(), &ticket)?;
    let smalls = SmallPublisher::new(&server).await?;
    print(&Ready { ready: true, port: address.port() })?;
    tokio::select! {
        ended = rounds(&mut publication, args.bytes) => ended,
        ended = smalls.run() => ended,
    }
}

/// Tells of each round, for ever.
async fn rounds(publication: &mut Publication, bytes: u64) -> Result<()> {
    for round in 1.. {
        let begun = Begun::now();
        let committed = publication.committed(round, ROUND_MAX).await;
        ensure!(committed, "no receiver finished round {round} within {} s", ROUND_MAX.as_secs());
        print(&Sent::since(begun, bytes))?;
    }
    Ok(())
}

/// Asks for `args.small` small tensors, then subscribes once per round, all in one session of so many `lanes`.
///
/// # Errors
/// When the server cannot be reached or sends anything else than what was asked for.
pub async fn receive(args: ReceiveArgs, lanes: u32) -> Result<()> {
    let ticket = ticket_file::take(args.connect.port())?;
    let connector = Connector::new(tuning(args.mtu));
    let config = tensor_relay_client::Config { lanes: Lanes::Fixed(lanes), ..Default::default() };
    let client = Client::connect_with(&connector, &ticket, config).await?;
    if args.small > 0 {
        print(&small::receive(&client, args.connect, args.small).await?)?;
    }
    for round in 0..args.rounds {
        let begun = Begun::now();
        let mut subscription = client.subscribe(&Topic::new(TOPIC)?).await?;
        let snapshot = subscription.next().await?;
        let received = Received::since(begun, round, args.bytes);
        // The payload has padding besides.
        let bytes: u64 = snapshot.tensors().map(|(_, bytes)| bytes.len() as u64).sum();
        ensure!(bytes == args.bytes, "{bytes} bytes came where {} were asked for", args.bytes);
        print(&received)?;
    }
    client.close().await;
    Ok(())
}

async fn publish(server: &Server, bytes: u64, tensors: u32) -> Result<Publication> {
    let spec = |(number, bytes): (u32, u64)| -> Result<TensorSpec> {
        let name = TensorName::new(&format!("model.layers.{number}.noise"))?;
        Ok(TensorSpec::new(name, Dtype::U8, Shape::new(&[bytes])?))
    };
    let specs = (0..).zip(cut(bytes, tensors)).map(spec).collect::<Result<_>>()?;
    let staged = Staged::new::<Infallible>(&server.staging(), specs, vec![], |tensor, out| {
        for (index, word) in (0..).zip(out.chunks_mut(8)) {
            word.copy_from_slice(&noise::at(tensor as u64, index).to_le_bytes()[..word.len()]);
        }
        Ok(())
    })?;
    // There is one version, so that nobody needs a copy of it.
    let options = TopicOptions { bases: 0, ..TopicOptions::default() };
    let mut publisher = server.publisher_with(Topic::new(TOPIC)?, None, options)?;
    Ok(publisher.publish(staged, vec![]).await?)
}

/// The sizes of so many `tensors` that together have so many `bytes`: the first ones take what does not divide.
fn cut(bytes: u64, tensors: u32) -> impl Iterator<Item = u64> {
    let tensors = u64::from(tensors);
    let (each, rest) = (bytes / tensors, bytes % tensors);
    (0..tensors).map(move |number| each + u64::from(number < rest))
}

fn tuning(mtu: u16) -> Tuning {
    Tuning { udp_payload_max: Some(mtu), ..Tuning::default() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_size_can_be_cut() {
        assert_eq!(cut(10, 4).collect::<Vec<_>>(), [3, 3, 2, 2]);
        assert_eq!(cut(2, 3).collect::<Vec<_>>(), [1, 1, 0]);
        assert_eq!(cut(1 << 30, 10_000).sum::<u64>(), 1 << 30);
    }
}
