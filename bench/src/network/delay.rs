//! A bridge between two network devices that delays each packet, for kernels without netem.
//!
//! The bridge is a process of its own. Both devices are TUN devices: packets that the system sends on one are read
//! here, held for the delay, and written to the other in order. Batches stay batches: the header that describes them is
//! forwarded unchanged.

use crate::contender::{Ready, print};
use anyhow::{Context, Result};
use std::{
    io,
    sync::{
        Arc,
        mpsc::{self, Receiver},
    },
    thread,
    time::{Duration, Instant},
};
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    task::spawn_blocking,
};
use tun_rs::{DeviceBuilder, SyncDevice};

/// The options of the bridge.
#[derive(Debug, Clone, clap::Args)]
pub struct DelayArgs {
    /// The name of the first device.
    pub near: String,
    /// The name of the second device.
    pub far: String,
    /// The delay of each packet.
    #[arg(long)]
    pub delay_ms: u32,
}

/// The subcommand of the bridge.
pub(crate) const DELAY_BRIDGE: &str = "delay-bridge";

/// Forwards packets until it is killed.
///
/// # Errors
/// When a device cannot be made, or is removed.
pub(crate) async fn run(args: DelayArgs) -> Result<()> {
    let near = device(&args.near)?;
    let far = device(&args.far)?;
    let delay = Duration::from_millis(args.delay_ms.into());
    print(&Ready::at(0))?;
    let near_to_far = {
        let (near, far) = (near.clone(), far.clone());
        spawn_blocking(move || forward_between(&near, &far, delay))
    };
    let far_to_near = spawn_blocking(move || forward_between(&far, &near, delay));
    tokio::select! {
        ended = near_to_far => ended?,
        ended = far_to_near => ended?,
    }
}

fn device(name: &str) -> Result<Arc<SyncDevice>> {
    // With offload, reads and writes move complete batches.
    let device = DeviceBuilder::new()
        .name(name)
        .offload(true)
        .inherit_enable_state()
        .build_sync();
    Ok(Arc::new(device.with_context(|| format!("cannot make the TUN device {name}"))?))
}

/// Forwards packets from one device to the other.
fn forward_between(from: &SyncDevice, to: &Arc<SyncDevice>, delay: Duration) -> Result<()> {
    let to = Arc::clone(to);
    // A device that is down, or out of memory, loses packets, as networks do.
    forward(|buffer| from.recv(buffer), move |packet| drop(to.send(packet)), delay)
}

/// Sends each packet that `receive` returns, in order, `delay` after its arrival, until `receive` fails. A packet for
/// which the queue has no room is lost.
fn forward(
    mut receive: impl FnMut(&mut [u8]) -> io::Result<usize>,
    send: impl FnMut(&[u8]) + Send + 'static,
    delay: Duration,
) -> Result<()> {
    let room = Arc::new(Semaphore::new(QUEUED_BYTES_MAX));
    let (queue, queued) = mpsc::channel();
    let sender = thread::spawn(move || send_when_due(&queued, send));
    let mut buffer = vec![0; PACKET_BYTES_MAX];
    let error = loop {
        match receive(&mut buffer) {
            Ok(length) => {
                let bytes = (length + PACKET_EXTRA_BYTES) as u32;
                let Ok(taken) = Arc::clone(&room).try_acquire_many_owned(bytes) else { continue };
                let packet = Packet { due: Instant::now() + delay, bytes: buffer[..length].to_vec(), taken };
                if queue.send(packet).is_err() {
                    break io::Error::other("the sending thread has ended");
                }
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => break error,
        }
    };
    // The queued packets are still sent.
    drop(queue);
    let _ = sender.join();
    Err(error).context("cannot read packets from a device")
}

/// A packet, the time at which it is forwarded, and the room that it takes in the queue.
struct Packet {
    due: Instant,
    bytes: Vec<u8>,
    taken: OwnedSemaphorePermit,
}

/// Sends each packet when it is due. The delay of all is equal, so the queue is in the order of due times.
fn send_when_due(queued: &Receiver<Packet>, mut send: impl FnMut(&[u8])) {
    for Packet { due, bytes, taken } in queued {
        thread::sleep(due.saturating_duration_since(Instant::now()));
        send(&bytes);
        drop(taken);
    }
}

/// The size of the read buffer: more than any batch with its headers.
const PACKET_BYTES_MAX: usize = 1 << 17;

/// The bound of the queue in one direction: enough for 25 Gbit/s and a delay of 85 ms, or for 2 Gbit/s and one of a
/// second. Beyond it, packets are lost.
const QUEUED_BYTES_MAX: usize = 256 << 20;

/// The maximum overhead of a queued packet beside its bytes.
const PACKET_EXTRA_BYTES: usize = 64;

#[cfg(test)]
mod tests {
    use super::*;
    use std::{os::unix::net::UnixDatagram, sync::Mutex};

    /// Goal: every packet arrives, in order, and none before its time. Method: packets over a local socket that is then
    /// closed; the time between sending and arrival is compared with the delay.
    #[test]
    fn packets_arrive_in_order_after_the_delay() {
        let (inside, outside) = UnixDatagram::pair().unwrap();
        let arrived = Arc::new(Mutex::new(vec![]));
        let delay = Duration::from_millis(20);
        let forwarding = thread::spawn({
            let arrived = Arc::clone(&arrived);
            let record = move |packet: &[u8]| arrived.lock().unwrap().push((packet.to_vec(), Instant::now()));
            // A closed socket returns empty packets without end, where a device would fail.
            let receive = move |buffer: &mut [u8]| match inside.recv(buffer)? {
                0 => Err(io::ErrorKind::BrokenPipe.into()),
                length => Ok(length),
            };
            move || forward(receive, record, delay)
        });
        let mut sent = vec![];
        for number in 1..=50u8 {
            sent.push(Instant::now());
            outside.send(&[number; 9]).unwrap();
        }
        outside.send(&[]).unwrap();
        assert!(forwarding.join().unwrap().is_err(), "the device is gone");
        let arrived = arrived.lock().unwrap();
        assert_eq!(arrived.len(), 50);
        for (number, ((packet, at), sent)) in (1..).zip(arrived.iter().zip(sent)) {
            assert_eq!(packet, &[number; 9]);
            assert!(*at >= sent + delay, "packet {number} was early");
        }
    }

    /// Goal: the queue is bounded. Method: more batches than fit, of which none is due during the test.
    #[test]
    fn the_queue_is_bounded() {
        let batch = 64 << 10;
        let (mut left, fitting) =
            (QUEUED_BYTES_MAX / batch + 10, QUEUED_BYTES_MAX / (batch + PACKET_EXTRA_BYTES));
        let receive = move |_: &mut [u8]| match left {
            0 => Err(io::ErrorKind::BrokenPipe.into()),
            _ => {
                left -= 1;
                Ok(batch)
            }
        };
        let sent = Arc::new(Mutex::new(0));
        let counter = Arc::clone(&sent);
        forward(receive, move |_| *counter.lock().unwrap() += 1, Duration::from_secs(2)).unwrap_err();
        assert_eq!(*sent.lock().unwrap(), fitting);
    }
}
