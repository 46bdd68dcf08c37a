//! The options of members of a swarm: subscribers that share with other hosts.

use crate::{
    sharing::{OfferOptions, SwarmOptions},
    units,
};
use std::{net::SocketAddr, str::FromStr};
use tensor_relay_client::Site;

/// Sharing with other hosts.
#[derive(Debug, clap::Args)]
pub(crate) struct SwarmArgs {
    /// Take chunks of large versions from other subscribers that share, too, and send them those that are verified here,
    /// while a version arrives and until the next one. With `take`, send them nothing. They are never trusted: what they
    /// send is compared with hashes of the server. A server whose operator does not want it ignores the option.
    #[arg(
        long, value_name = "yes|take|no", num_args = 0..=1, require_equals = true, default_value = "no",
        default_missing_value = "yes", help_heading = HEADING
    )]
    pub(crate) share: ShareArg,

    /// With --share: the address at which other subscribers take chunks, over UDP and TCP. They learn the port, and the
    /// address from which this host connects to the server. With port 0, the system chooses one.
    #[arg(long, value_name = "ADDR:PORT", default_value = "[::]:0", help_heading = HEADING)]
    pub(crate) share_listen: SocketAddr,

    /// With --share: the maximum rate at which chunks are sent to other subscribers, e.g. 100Mbit or 1Gbit. Default: no
    /// limit.
    #[arg(long, value_name = "RATE", value_parser = units::parse_rate, help_heading = HEADING)]
    pub(crate) share_rate: Option<u64>,

    /// With --share: the maximum memory for each version's encoded chunks, which are kept to be sent again; others are not
    /// offered. Chunks that came without an encoding need none. Default: a quarter of the version, at most 1GiB.
    #[arg(long, value_name = "SIZE", value_parser = units::parse_bytes_or_zero, help_heading = HEADING)]
    pub(crate) share_mem: Option<u64>,

    /// With --share: a label of the place where this host is, such as its rack or data centre. Chunks are taken from
    /// subscribers with the same label if one of them has them, so that few pass between places.
    #[arg(
        long, value_name = "LABEL", value_parser = Site::new, default_value = "", hide_default_value = true,
        help_heading = HEADING
    )]
    pub(crate) site: Site,
}

impl SwarmArgs {
    /// What is shared; `None` if nothing is.
    pub(crate) fn options(&self) -> Option<SwarmOptions> {
        let offer =
            OfferOptions { listen: self.share_listen, rate: self.share_rate, kept_bytes: self.share_mem };
        let offer = match self.share {
            ShareArg::No => return None,
            ShareArg::Take => None,
            ShareArg::Yes => Some(offer),
        };
        Some(SwarmOptions { site: self.site.clone(), offer })
    }
}

const HEADING: &str = "Sharing with other hosts";

/// The values of `--share`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ShareArg {
    /// Chunks come from the server alone.
    No,
    /// Chunks are taken from others, too.
    Take,
    /// Chunks are taken from others and sent to them.
    Yes,
}

impl FromStr for ShareArg {
    type Err = &'static str;

    /// `yes` and `no` have the spellings of a switch: variables and the file may hold `true`, as for other options.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match &*text.to_lowercase() {
            "take" => Ok(Self::Take),
            "yes" | "true" | "on" | "1" | "y" | "t" => Ok(Self::Yes),
            "no" | "false" | "off" | "0" | "n" | "f" => Ok(Self::No),
            _ => Err("write yes, take or no"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sharing_is_a_switch_with_a_third_value() {
        use ShareArg::{No, Take, Yes};
        for (text, share) in [("yes", Yes), ("true", Yes), ("On", Yes), ("take", Take), ("no", No), ("0", No)]
        {
            assert_eq!(text.parse(), Ok(share), "{text}");
        }
        for wrong in ["", "give", "yes take", "2"] {
            assert!(wrong.parse::<ShareArg>().is_err(), "{wrong}");
        }
    }
}
