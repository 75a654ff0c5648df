//! Writes `fuzz/seeds/TARGET/NN`: what the fuzzer begins with. Run it after a change of a format:
//! `cargo run -p dunlin-fuzz --example seeds`.

fn main() -> std::io::Result<()> {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("seeds");
    if root.is_dir() {
        std::fs::remove_dir_all(&root)?;
    }
    let (mut files, mut bytes) = (0, 0);
    for (target, name, content) in dunlin_fuzz::seeds::all() {
        std::fs::create_dir_all(root.join(target))?;
        std::fs::write(root.join(target).join(name), &content)?;
        (files, bytes) = (files + 1, bytes + content.len());
    }
    println!("seeds: {files} files, {bytes} bytes");
    Ok(())
}
