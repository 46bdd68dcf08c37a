//! Checks of UDP on this machine: socket buffer limits, and segmentation offload.

use super::finding::{Finding, Fix, State};
use crate::units;
use nix::sys::socket::{getsockopt, setsockopt, sockopt};
use std::{io, net::UdpSocket, time::Duration};
use tensor_relay_client::Tuning;

/// The size of a packet: small enough for any network.
const SEGMENT_BYTES: usize = 1_200;

/// The number of packets in the test batch.
const SEGMENTS: usize = 8;

/// The deadline for packets over loopback.
const RECEIVE_TIMEOUT: Duration = Duration::from_secs(2);

const BATCH_FIX: Fix = Fix {
    host: "Linux 5.0 or newer, without a firewall rule or security module that rejects UDP_SEGMENT and UDP_GRO; until \
           then --transport tcp is faster",
    docker: "a newer kernel on the host, or a runtime that is not gVisor; until then --transport tcp is faster",
    kubernetes: "a newer kernel on the node, or a RuntimeClass that is not gVisor; until then --transport tcp is \
                 faster",
};

pub(super) fn check() -> Vec<Finding> {
    let wanted = Tuning::default().socket_buffer_bytes as usize;
    let buffers = granted_buffer(wanted)
        .map_or_else(|error| no_socket(&error), |granted| judge_buffers(granted, wanted));
    [vec![buffers], batches()].concat()
}

fn no_socket(error: &io::Error) -> Finding {
    let fix = Fix {
        host: "allow this user to open UDP sockets, or use --transport tcp",
        docker: "the default seccomp profile allows UDP; or use --transport tcp",
        kubernetes: "seccompProfile: RuntimeDefault allows UDP; or use --transport tcp",
    };
    Finding::new("UDP buffers", State::Fail, format!("cannot open a UDP socket: {error}"), "UDP sockets", fix)
}

/// The receive buffer, in bytes, that the system grants for a request of `wanted` bytes. Servers and consumers request
/// it in the same way.
fn granted_buffer(wanted: usize) -> io::Result<usize> {
    let socket = UdpSocket::bind("0.0.0.0:0")?;
    // `RcvBufForce` may exceed the system's limit, but requires CAP_NET_ADMIN.
    let forced = setsockopt(&socket, sockopt::RcvBufForce, &wanted);
    forced.or_else(|_| setsockopt(&socket, sockopt::RcvBuf, &wanted))?;
    // The kernel reports twice the granted size, which includes its bookkeeping.
    Ok(getsockopt(&socket, sockopt::RcvBuf)? / 2)
}

fn judge_buffers(granted: usize, wanted: usize) -> Finding {
    let fix = Fix {
        host: "sysctl -w net.core.rmem_max=4194304 net.core.wmem_max=4194304; to make that permanent, the same in \
               /etc/sysctl.d",
        docker: "the same sysctl on the host (a container cannot change it), or --cap-add NET_ADMIN",
        kubernetes: "the same sysctl on the node (it is not namespaced), or the capability NET_ADMIN",
    };
    let measured =
        format!("{} granted of {} requested", units::bytes(granted as u64), units::bytes(wanted as u64));
    let wanted_text = format!("{}; with less, QUIC loses packets in bursts", units::bytes(wanted as u64));
    Finding::new("UDP buffers", State::Warn.unless(granted >= wanted), measured, wanted_text, fix)
}

/// Sends a batch over loopback in one system call, and checks whether it is received in one.
fn batches() -> Vec<Finding> {
    const SEND: &str = "UDP send batches";
    const RECEIVE: &str = "UDP receive batches";
    let wanted = "batches: without them, each packet costs a system call";
    match try_batch() {
        Err(error) => {
            let measured = format!("a batch could not be sent over loopback (UDP_SEGMENT): {error}");
            vec![Finding::new(SEND, State::Warn, measured, wanted, BATCH_FIX)]
        }
        Ok(Batch { received_bytes, is_gro_allowed }) => {
            let sent = Finding::ok(SEND, format!("{SEGMENTS} packets in one system call"), wanted);
            let measured = match is_gro_allowed {
                true => format!("{} packets in one system call", received_bytes / SEGMENT_BYTES),
                false => "the system rejects UDP_GRO".into(),
            };
            let is_good = is_gro_allowed && received_bytes > SEGMENT_BYTES;
            vec![sent, Finding::new(RECEIVE, State::Warn.unless(is_good), measured, wanted, BATCH_FIX)]
        }
    }
}

/// The result of receiving a batch.
struct Batch {
    /// The number of bytes in the first receive call.
    received_bytes: usize,
    is_gro_allowed: bool,
}

fn try_batch() -> io::Result<Batch> {
    let (from, to) = (UdpSocket::bind("127.0.0.1:0")?, UdpSocket::bind("127.0.0.1:0")?);
    let is_gro_allowed = setsockopt(&to, sockopt::UdpGroSegment, &true).is_ok();
    setsockopt(&from, sockopt::UdpGsoSegment, &(SEGMENT_BYTES as i32))?;
    to.set_read_timeout(Some(RECEIVE_TIMEOUT))?;
    from.send_to(&[0; SEGMENT_BYTES * SEGMENTS], to.local_addr()?)?;
    let received_bytes = to.recv(&mut [0; SEGMENT_BYTES * SEGMENTS])?;
    Ok(Batch { received_bytes, is_gro_allowed })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clamped_buffers_are_a_warning() {
        assert_eq!(judge_buffers(4 << 20, 4 << 20).state, State::Ok);
        let clamped = judge_buffers(212_992, 4 << 20);
        assert_eq!(clamped.state, State::Warn);
        assert!(clamped.measured.contains("208 KiB granted of 4.00 MiB"), "{clamped:?}");
        assert!(clamped.fix.unwrap().host.contains("rmem_max=4194304"));
    }
}
