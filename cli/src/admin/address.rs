//! Command line options of the admin port.

use crate::units;
use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr},
    path::PathBuf,
    str::FromStr,
    time::Duration,
};

/// The default address of `serve`'s admin port: loopback only.
pub(super) const DEFAULT: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 9470);

#[derive(Debug, Clone, Default, clap::Args)]
pub(crate) struct AdminArgs {
    /// The address of the admin port, which serves /metrics, /status, /livez, /readyz and a status page over HTTP; or
    /// `none`. Default: 127.0.0.1:9470 for `serve` if that is free, none for `subscribe`. An address other than
    /// loopback requires --admin-token-file.
    #[arg(long, value_name = "ADDR:PORT|none", help_heading = "Admin port")]
    pub(crate) admin: Option<Admin>,

    /// A file with a token of 16 characters or more, which the admin port requires for every path except /livez and
    /// /readyz.
    #[arg(long, value_name = "FILE", help_heading = "Admin port")]
    pub(crate) admin_token_file: Option<PathBuf>,
}

impl AdminArgs {
    /// Whether to open an admin port, for a command that `has_default` or not.
    pub(crate) fn is_wanted(&self, has_default: bool) -> bool {
        match self.admin {
            Some(Admin::None) => false,
            Some(Admin::At(_)) => true,
            None => has_default,
        }
    }
}

/// The readiness condition of a consumer.
#[derive(Debug, Clone, Default, clap::Args)]
pub(crate) struct ReadyArgs {
    /// With --admin: /readyz reports not ready when the newest version was received longer ago than this, in seconds.
    /// Default: no limit.
    #[arg(long, value_name = "SECONDS", value_parser = units::parse_positive_seconds, help_heading = "Admin port")]
    pub(crate) ready_within: Option<Duration>,
}

/// The address of the admin port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Admin {
    /// No admin port.
    None,
    At(SocketAddr),
}

impl FromStr for Admin {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "none" => Ok(Self::None),
            address => address
                .parse()
                .map(Self::At)
                .map_err(|_| "write an address and a port, such as 127.0.0.1:9470, or none"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_admin_port_is_an_address_or_none() {
        assert_eq!("none".parse(), Ok(Admin::None));
        assert_eq!("127.0.0.1:9470".parse(), Ok(Admin::At(DEFAULT)));
        assert!("[::]:0".parse::<Admin>().is_ok());
        for wrong in ["", "off", "9470", "localhost:9470", "127.0.0.1"] {
            assert!(wrong.parse::<Admin>().is_err(), "{wrong}");
        }
    }
}
