//! The options for caches of inference engines.

use tensor_relay_server::EngineCache;

/// What a publisher sends beside a model.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct SentCacheArgs {
    /// Send the cache of an engine with each folder of a model: `vllm`, `inductor` or `triton` from where that engine
    /// keeps it, or NAME=FOLDER for any. Repeat the option for several, or separate them by `,`. Consumers unpack it if
    /// they ask for it and their machine is alike.
    #[arg(long, value_name = "NAME[=FOLDER]", value_parser = parse_engine_cache, value_delimiter = ',', help_heading = "Topics")]
    pub(crate) engine_cache: Vec<EngineCache>,

    /// With --engine-cache: what the cache was made for, instead of what is found out here: `gpu`, `driver`, `torch`
    /// and so on. `KEY=*` agrees with every consumer. Repeat the option, or separate several by `,`.
    #[arg(long, value_name = "KEY=VALUE", value_parser = parse_fact, value_delimiter = ',', help_heading = "Topics")]
    pub(crate) engine_fact: Vec<(String, String)>,
}

/// What a subscriber unpacks.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct UnpackedCacheArgs {
    /// With --out: unpack this cache of an engine, if the version has it and this machine is alike, to where the engine
    /// looks: `vllm`, `inductor` or `triton`, or NAME=FOLDER. It contains code that the engine will run, so use it only
    /// if you trust the publisher with that. What exists is not replaced. Repeat the option for several, or separate
    /// them by `,`.
    #[arg(
        long,
        value_name = "NAME[=FOLDER]",
        value_parser = parse_engine_cache,
        value_delimiter = ',',
        requires = "out",
        help_heading = "Output"
    )]
    pub(crate) engine_cache: Vec<EngineCache>,

    /// With --engine-cache: what this machine is, instead of what is found out: `gpu`, `driver`, `torch` and so on.
    /// `KEY=*` agrees with every cache. Repeat the option, or separate several by `,`.
    #[arg(long, value_name = "KEY=VALUE", value_parser = parse_fact, value_delimiter = ',', help_heading = "Output")]
    pub(crate) engine_fact: Vec<(String, String)>,
}

/// Parses `NAME` of a known engine or `NAME=FOLDER`, with the folders of this process's environment.
///
/// # Errors
/// What is wrong with the text.
pub fn parse_engine_cache(text: &str) -> Result<EngineCache, String> {
    EngineCache::parse(text, variable).map_err(|error| error.to_string())
}

/// Reads a variable. Containers often lack `USER` and `HOME`, which engines then take from the user database.
fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().or_else(|| {
        let field = match name {
            "USER" => 0,
            "HOME" => 5,
            _ => return None,
        };
        let users = std::fs::read_to_string("/etc/passwd").ok()?;
        let own = rustix::process::geteuid().as_raw().to_string();
        let mut users = users.lines().map(|line| line.split(':').collect::<Vec<_>>());
        users
            .find(|user| user.get(2) == Some(&&*own))?
            .get(field)
            .map(|&value| value.to_owned())
    })
}

fn parse_fact(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((fact, value)) if !fact.is_empty() && !value.is_empty() => Ok((fact.into(), value.into())),
        _ => Err("write KEY=VALUE, e.g. torch=2.9.0, or KEY=*".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::PathBuf;

    #[test]
    fn caches_have_names_and_folders() {
        assert_eq!(parse_engine_cache("jit=/a=b").map(|cache| cache.folder), Ok(PathBuf::from("/a=b")));
        assert!(parse_engine_cache("jit").unwrap_err().contains("name its folder"));
        assert!(parse_engine_cache("jit=a").unwrap_err().contains("not absolute"));
        assert_eq!(parse_fact("a=b=c"), Ok(("a".into(), "b=c".into())));
        assert!(["a", "=b", "a="].iter().all(|text| parse_fact(text).is_err()));
    }
}
