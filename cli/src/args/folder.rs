//! The options for served and published folders.

use tensor_relay_server::FolderRules;

#[derive(Debug, Clone, Copy, clap::Args)]
pub(crate) struct FolderArgs {
    /// Serve all files directly in a folder that are not hidden. Without this option, only the files of a model are
    /// served: weights, index, configuration, tokenizer, chat template, code, README and licence.
    #[arg(long, help_heading = "Topics")]
    pub(crate) all_files: bool,

    /// Follow all symbolic links in a folder. Without this option, only links within the folder and to blobs of the
    /// Hugging Face cache are followed. If the path of the folder is a link, it is always followed.
    #[arg(long, help_heading = "Topics")]
    pub(crate) follow_links: bool,
}

impl From<FolderArgs> for FolderRules {
    fn from(FolderArgs { all_files, follow_links }: FolderArgs) -> Self {
        Self { all_files, follow_links }
    }
}
