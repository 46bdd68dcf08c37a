//! A transfer that a proxy holds in the middle, so that a test can change a file or end a process meanwhile.

use crate::files;
use tensor_relay_tests::processes::{Home, Process, Serving, UdpProxy};

/// The size of the file. A quarter passes before the proxy holds; the rest is larger than all buffers on the path.
pub(crate) const MODEL_BYTES: usize = 64 << 20;

/// A server of the file `w`, and a subscriber that waits in the middle of it.
pub(crate) struct HeldTransfer {
    pub(crate) home: Home,
    pub(crate) proxy: UdpProxy,
    pub(crate) server: Serving,
    pub(crate) subscriber: Process,
}

impl HeldTransfer {
    /// Starts the server with `serve_options`, and `subscribe --out=out` with `subscribe_options`.
    pub(crate) fn new(serve_options: &[&str], subscribe_options: &[&str]) -> Self {
        Self::in_home(Home::new(), serve_options, subscribe_options)
    }

    /// As [`new`](Self::new), in a folder that may have further files.
    pub(crate) fn in_home(home: Home, serve_options: &[&str], subscribe_options: &[&str]) -> Self {
        let (home, mut proxy) = (home.over_quic(), UdpProxy::new());
        files::write_noise(&home.path("w"), MODEL_BYTES, 1);
        let server = home.serve(&[&["--topic=w=w", &proxy.advertise()], serve_options].concat());
        proxy.forward_to(server.listen(), MODEL_BYTES as u64 / 4);
        let args = ["subscribe", server.ticket("w"), "--out=out"];
        let subscriber = home.start(&[&args, subscribe_options].concat());
        proxy.wait_until_held();
        Self { home, proxy, server, subscriber }
    }
}
