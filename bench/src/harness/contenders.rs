//! The contenders, and the choice of those to compare.

use super::place::Role;
use crate::{
    node::{FOLLOW, PUBLISH},
    program::Program,
    relay::Job,
};
use anyhow::{Result, bail, ensure};
use std::{
    ffi::OsString,
    path::{Path, PathBuf},
};

/// A program, or a variant of one, that can be compared.
#[derive(Debug, Clone)]
pub(crate) struct Contender {
    pub(crate) name: String,
    /// The working directory of its processes, if not the current one.
    pub(super) folder: Option<PathBuf>,
    pub(super) serve: SideCommand,
    pub(super) receive: SideCommand,
    /// The number of receiving processes.
    pub(super) receivers: u32,
    /// One more receiving process, which is slow and not measured.
    pub(super) slow: Option<SideCommand>,
    /// Whether the payload is encrypted.
    pub(super) encrypted: bool,
    /// `reused` if the receiving side reuses its memory in each round, `fresh` if it allocates new memory.
    pub(super) receives_into: String,
    /// Remarks on its numbers.
    pub(super) note: String,
    /// Whether it supports small messages.
    pub(super) has_small: bool,
    /// Whether it is tensor-relay or a variant of it.
    pub(super) is_ours: bool,
    /// Whether it is a program of another project, which may not be installed.
    pub(super) is_external: bool,
}

/// The command of one side: its program, and the arguments before the options of [`contender`](crate::contender).
#[derive(Debug, Clone)]
pub(crate) struct SideCommand {
    pub(super) program: Program,
    pub(super) arguments: Vec<OsString>,
}

/// All contenders, from which [`pick`](Self::pick) chooses.
#[derive(Debug)]
pub(crate) struct Contenders {
    contenders: Vec<Contender>,
}

impl Contender {
    /// tensor-relay with a job that `receivers` processes follow. A slow one has the option `--slow` in addition.
    pub(crate) fn of_job(name: &str, this: &Program, job: &Job, follow_options: &[&str]) -> Result<Self> {
        let job_option = format!("--job={}", serde_json::to_string(job)?);
        let side = |subcommand: [&str; 2], options: &[&str]| SideCommand {
            program: this.clone(),
            arguments: subcommand
                .iter()
                .chain(&[job_option.as_str()])
                .chain(options)
                .map(OsString::from)
                .collect(),
        };
        let slow = || side(FOLLOW, &[follow_options, &["--slow"]].concat());
        Ok(Self {
            serve: side(PUBLISH, &[]),
            receive: side(FOLLOW, follow_options),
            receivers: job.receivers,
            slow: job.has_slow.then(slow),
            ..contender(name, this, RELAY_SUBCOMMAND, &[], &[], true)
        })
    }

    /// The name of one of its processes, for messages and tables.
    pub(super) fn process_name(&self, role: Role) -> String {
        match (role, self.serves_jobs()) {
            (Role::Server, false) => format!("{} serve", self.name),
            (Role::Receiver(_), false) => format!("{} receive", self.name),
            (Role::Server, true) => "producer".into(),
            (Role::Receiver(number), true) => format!("consumer {}", number + 1),
        }
    }

    fn serves_jobs(&self) -> bool {
        self.receive.arguments.get(1).is_some_and(|side| side == FOLLOW[1])
    }

    /// Environment variables added for all processes. tensor-relay and its variants get none: they run as users run
    /// them. The other contenders get the settings that make them fastest.
    pub(super) fn environment(&self) -> Vec<(&'static str, &'static str)> {
        let copies = (!self.is_ours).then_some(NO_REP_MOVSB);
        let memory = self.is_external.then_some(KEEP_FREED_MEMORY);
        copies.into_iter().chain(memory).collect()
    }
}

impl Contenders {
    /// The contenders that `this` program implements, and the tensor-relay of `other_build`, if given.
    pub(crate) fn of_this(this: &Program, other_build: Option<&Path>) -> Self {
        let own = |name: &str, subcommand: &str, serve: &[&str], receive: &[&str], encrypted: bool| {
            contender(name, this, subcommand, serve, receive, encrypted)
        };
        let mut contenders = vec![
            own(RELAY, RELAY_SUBCOMMAND, &[], &[], true),
            own(STOCK_QUINN, "stock-quinn", &[], &[], true),
            own("tcp", "tcp", &[], &[], false),
            own("tcp-tls", "tcp", &["--tls"], &["--tls"], true),
            own(MANY_TENSORS, RELAY_SUBCOMMAND, &["--tensors=10000"], &[], true),
            own(BORROWED, RELAY_SUBCOMMAND, &[BORROW], &[], true),
        ];
        contenders.extend(LANES.map(|(name, option)| own(name, RELAY_SUBCOMMAND, &[], &[option], true)));
        contenders.extend(CODECS.map(|(name, option)| own(name, RELAY_SUBCOMMAND, &[option], &[], true)));
        if let Some(executable) = other_build {
            let program = Program::new(executable, &[]);
            contenders.push(contender(OTHER_BUILD, &program, RELAY_SUBCOMMAND, &[], &[], true));
        }
        Self { contenders }
    }

    /// Adds `borrowed` with one or both sides in Python. `python` is an interpreter with the package tensor_relay.
    pub(crate) fn extend_with_python(&mut self, this: &Program, python: &Path) {
        let borrowed = contender(BORROWED, this, RELAY_SUBCOMMAND, &[BORROW], &[], true);
        let in_python = |arguments: &[&str]| SideCommand {
            program: Program::new(python, &["-P", "-c", PYTHON_PROGRAM]),
            arguments: arguments.iter().copied().map(Into::into).collect(),
        };
        let (serve, receive) = (in_python(&["serve"]), in_python(&["receive"]));
        self.contenders.extend([
            Contender {
                name: "python".into(),
                serve: serve.clone(),
                receive: receive.clone(),
                ..borrowed.clone()
            },
            Contender {
                name: "python-auto-lanes".into(),
                serve: serve.clone(),
                receive: in_python(&["receive", AUTO_LANES]),
                ..borrowed.clone()
            },
            Contender { name: "python-producer".into(), serve, ..borrowed.clone() },
            Contender { name: "python-consumer".into(), receive, ..borrowed },
        ]);
    }

    /// Adds `peers`. A peer whose name is taken is called `peers/NAME`.
    ///
    /// # Errors
    /// When `peers/NAME` is taken, too.
    pub(crate) fn extend(&mut self, peers: Vec<Contender>) -> Result<()> {
        for mut peer in peers {
            if self.has(&peer.name) || peer.name == ALL {
                peer.name = format!("peers/{}", peer.name);
            }
            ensure!(!self.has(&peer.name), "two peers have the same name: {}", peer.name);
            self.contenders.push(peer);
        }
        Ok(())
    }

    fn has(&self, name: &str) -> bool {
        self.contenders.iter().any(|contender| contender.name == name)
    }

    /// The contenders called `names`, in this order, each once. The name `all` stands for `tensor-relay` and all
    /// contenders that are no variants of it.
    ///
    /// # Errors
    /// When one of the names belongs to no contender.
    pub(crate) fn pick(&self, names: &[String]) -> Result<Vec<Contender>> {
        let mut picked: Vec<Contender> = vec![];
        for name in names {
            let matches = |contender: &&Contender| match name.as_str() {
                ALL => contender.name == RELAY || !contender.is_ours,
                name => contender.name == name,
            };
            let mut found = self.contenders.iter().filter(matches).peekable();
            if found.peek().is_none() {
                bail!("there is no contender called {name:?}; the contenders are {}", self.names());
            }
            for contender in found {
                if !picked.iter().any(|other| other.name == contender.name) {
                    picked.push(contender.clone());
                }
            }
        }
        Ok(picked)
    }

    fn names(&self) -> String {
        let names: Vec<&str> = self.contenders.iter().map(|contender| contender.name.as_str()).collect();
        format!("{}, and {ALL}; --relay, --python and --peers add more", names.join(", "))
    }
}

/// The contender that `program` implements as its subcommand `subcommand`, with additional options for either side.
fn contender(
    name: &str,
    program: &Program,
    subcommand: &str,
    serve: &[&str],
    receive: &[&str],
    encrypted: bool,
) -> Contender {
    let side = |side: &str, options: &[&str]| SideCommand {
        program: program.clone(),
        arguments: [subcommand, side].iter().chain(options).map(OsString::from).collect(),
    };
    Contender {
        name: name.into(),
        folder: None,
        serve: side("serve", serve),
        receive: side("receive", receive),
        receivers: 1,
        slow: None,
        encrypted,
        receives_into: "reused".into(),
        note: String::new(),
        has_small: true,
        is_ours: subcommand == RELAY_SUBCOMMAND,
        is_external: false,
    }
}

pub(crate) const RELAY: &str = "tensor-relay";
pub(crate) const STOCK_QUINN: &str = "stock-quinn";
/// The subcommand of this program that runs tensor-relay.
const RELAY_SUBCOMMAND: &str = "relay";
const MANY_TENSORS: &str = "10000-tensors";
const OTHER_BUILD: &str = "other-build";
/// The name of tensor-relay with tensors that are lent for each round, and hashed when they are sent.
const BORROWED: &str = "borrowed";
const BORROW: &str = "--hold=borrow";
/// The program of the sides in Python of `python`, `python-auto-lanes`, `python-producer` and `python-consumer`.
const PYTHON_PROGRAM: &str = include_str!("../relay/contender.py");
const ALL: &str = "all";

/// The receiving side's option for an automatic number of lanes.
const AUTO_LANES: &str = "--lanes=0";

/// Variants with several lanes, or with as many as a client chooses by default.
const LANES: [(&str, &str); 4] = [
    ("auto-lanes", AUTO_LANES),
    ("2-lanes", "--lanes=2"),
    ("4-lanes", "--lanes=4"),
    ("8-lanes", "--lanes=8"),
];

/// Variants with one codec for all chunks; plain `tensor-relay` chooses one for each chunk.
const CODECS: [(&str, &str); 4] = [
    ("raw", "--codec=raw"),
    ("bitplanes", "--codec=bitplanes"),
    ("planes", "--codec=planes"),
    ("zstd", "--codec=zstd"),
];

/// Keeps glibc from copying with `rep movsb`. On AMD processors that is several times slower if source and destination
/// have the same offset in their pages; this nearly doubled the CPU time of a receiver over TLS. Other C libraries
/// ignore it.
const NO_REP_MOVSB: (&str, &str) = ("GLIBC_TUNABLES", "glibc.cpu.x86_rep_movsb_threshold=1073741824");

/// Makes glibc keep free memory, up to 64 MiB. Returning memory to the system after each piece and allocating it again
/// more than doubled the CPU time of a sender over TLS. The contenders of this program do not need it: they
/// allocate with mimalloc.
const KEEP_FREED_MEMORY: (&str, &str) = ("MALLOC_TRIM_THRESHOLD_", "67108864");

#[cfg(test)]
mod tests {
    use super::*;

    fn contenders() -> Contenders {
        let this = Program::new("bench", &[]);
        let mut contenders = Contenders::of_this(&this, Some(Path::new("old")));
        let mut peer = contender("zeromq", &this, "x", &[], &[], false);
        peer.is_external = true;
        contenders.extend(vec![peer]).unwrap();
        contenders
    }

    fn picked(names: &[&str]) -> Result<Vec<String>> {
        let names: Vec<String> = names.iter().map(ToString::to_string).collect();
        Ok(contenders().pick(&names)?.into_iter().map(|contender| contender.name).collect())
    }

    #[test]
    fn contenders_are_picked_in_order_and_only_once() {
        assert_eq!(picked(&["tcp", "tensor-relay", "tcp"]).unwrap(), ["tcp", "tensor-relay"]);
        assert_eq!(
            picked(&["tcp-tls", "all"]).unwrap(),
            ["tcp-tls", "tensor-relay", "stock-quinn", "tcp", "zeromq"],
            "the contender that was named first stays first"
        );
        assert_eq!(picked(&["other-build"]).unwrap(), ["other-build"]);
    }

    #[test]
    fn all_variants_of_tensor_relay_are_ours() {
        let ours = contenders().contenders.into_iter().filter(|contender| contender.is_ours);
        let names: Vec<String> = ours.map(|contender| contender.name).collect();
        let variants = [
            "10000-tensors",
            "borrowed",
            "auto-lanes",
            "2-lanes",
            "4-lanes",
            "8-lanes",
            "raw",
            "bitplanes",
            "planes",
            "zstd",
        ];
        assert_eq!(names, [&["tensor-relay"], &variants[..], &["other-build"]].concat());
    }

    #[test]
    fn python_can_run_either_side() {
        let mut contenders = contenders();
        contenders.extend_with_python(&Program::new("bench", &[]), Path::new("python3.12"));
        let names = ["python", "python-auto-lanes", "python-producer", "python-consumer"].map(String::from);
        let is_python = |side: &SideCommand| side.program.words().next().unwrap() == "python3.12";
        let sides: Vec<_> = contenders
            .pick(&names)
            .unwrap()
            .iter()
            .map(|c| (is_python(&c.serve), is_python(&c.receive)))
            .collect();
        assert_eq!(sides, [(true, true), (true, true), (true, false), (false, true)]);
        assert!(
            contenders
                .pick(&["all".into()])
                .unwrap()
                .iter()
                .all(|c| !c.name.contains("python"))
        );
    }

    #[test]
    fn the_error_for_an_unknown_name_lists_all_names() {
        let error = picked(&["tcp", "utp"]).unwrap_err().to_string();
        assert!(
            error.contains("\"utp\"") && error.contains("tcp-tls") && error.contains("zeromq"),
            "{error}"
        );
    }

    #[test]
    fn names_are_unique() {
        let mut contenders = contenders();
        let tcp = contenders.pick(&["tcp".into()]).unwrap();
        contenders.extend(tcp.clone()).unwrap();
        assert_eq!(contenders.pick(&["peers/tcp".into()]).unwrap().len(), 1);
        assert!(contenders.extend(tcp).unwrap_err().to_string().contains("peers/tcp"));
    }

    #[test]
    fn subcommands_come_before_options() {
        let tls = contenders().pick(&["tcp-tls".into()]).unwrap().remove(0);
        assert_eq!(tls.serve.arguments, ["tcp", "serve", "--tls"]);
        assert_eq!(tls.receive.arguments, ["tcp", "receive", "--tls"]);
    }

    #[test]
    fn tensor_relay_gets_no_environment_variables() {
        let names = ["tensor-relay", "2-lanes", "stock-quinn", "tcp-tls"].map(str::to_owned);
        let mut contenders = contenders().pick(&names).unwrap();
        contenders.push(Contender { is_external: true, ..contenders[3].clone() });
        let environments: Vec<_> = contenders.iter().map(Contender::environment).collect();
        assert_eq!(
            environments,
            [vec![], vec![], vec![NO_REP_MOVSB], vec![NO_REP_MOVSB], vec![NO_REP_MOVSB, KEEP_FREED_MEMORY]]
        );
    }
}
