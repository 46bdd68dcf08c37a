//! The options for served folders.

use tensor_relay_server::FolderRules;

#[derive(Debug, Clone, Copy, clap::Args)]
pub(crate) struct FolderArgs {
    /// Of a folder, serve every file that lies directly in it and is not hidden, and not only what models consist of:
    /// weights, index, configuration, tokenizer, chat template, code, README and licence.
    #[arg(long, help_heading = "Topics")]
    pub(crate) all_files: bool,

    /// In a folder, follow links wherever they lead, and not only within the folder and to the blobs of Hugging Face's
    /// cache. A link that is itself given as the path is always followed.
    #[arg(long, help_heading = "Topics")]
    pub(crate) follow_links: bool,
}

impl From<FolderArgs> for FolderRules {
    fn from(FolderArgs { all_files, follow_links }: FolderArgs) -> Self {
        Self { all_files, follow_links }
    }
}
