"""The stand-in itself: it refuses what the Hub refuses, so that passing against it means something."""

CODE = """
from huggingface_hub import HfApi, hf_hub_download, snapshot_download
from huggingface_hub.errors import EntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError, HfHubHTTPError

api = HfApi()
assert api.whoami()["name"] == "tester"
api.create_repo("tester/one")
api.create_repo("tester/one", exist_ok=True)
open("a.txt", "w").write("hello")
open("w.safetensors", "wb").write(bytes(5000))
commit = api.upload_file(path_or_fileobj="a.txt", path_in_repo="a.txt", repo_id="tester/one")
api.upload_file(path_or_fileobj="w.safetensors", path_in_repo="w.safetensors", repo_id="tester/one")
assert set(api.list_repo_files("tester/one")) == {".gitattributes", "a.txt", "w.safetensors"}
assert open(hf_hub_download("tester/one", "w.safetensors"), "rb").read() == bytes(5000)
folder = snapshot_download("tester/one", revision=commit.oid)
assert open(folder + "/a.txt").read() == "hello"
sizes = {entry.path: entry.size for entry in api.list_repo_tree("tester/one")}
assert sizes["w.safetensors"] == 5000

for error, action in [
    (EntryNotFoundError, lambda: hf_hub_download("tester/one", "absent.txt")),
    (RepositoryNotFoundError, lambda: hf_hub_download("tester/absent", "a.txt")),
    (RevisionNotFoundError, lambda: hf_hub_download("tester/one", "a.txt", revision="absent")),
    (HfHubHTTPError, lambda: HfApi(token="hf_wrong").create_repo("tester/two")),
]:
    try:
        action()
    except error:
        continue
    raise AssertionError(f"no {error.__name__}")
print("done")
"""


def test_client_calls(hub, run_client):
    assert run_client(CODE)[0] == "done\n"
    assert list(hub.repos) == ["tester/one"]
    assert hub.repos["tester/one"].files["a.txt"] == b"hello"
