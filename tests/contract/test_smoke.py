import torch
def test_smoke(client, partition, plane):
    client.kv_put("a", partition, {"x": torch.tensor([1,2,3])})
    client.kv_put("b", partition, {"x": torch.tensor([1,2])})
    client.kv_batch_put(["c","d"], partition, {"x": [torch.tensor([1,2]), torch.tensor([5])]})
    client.kv_batch_put(["e","f"], partition, {"x": [torch.arange(1000000), torch.tensor([5])]})
    client.kv_batch_put(["g","h"], partition, {"x": [torch.arange(1000000), torch.tensor([5])]})
    r = client.kv_batch_get(["f","b","a","g"], partition, layout="list")
    print(plane.kind, client.status()["values"])
    assert [len(x) for x in r["x"]] == [1,2,3,1000000]
