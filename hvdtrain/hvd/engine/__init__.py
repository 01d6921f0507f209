"""The machinery under the Horovod API: one control thread and one data thread per process.

    submit ---> control thread ---(star of TCP connections)---> coordinator on rank 0
                     ^                                               |
                     '------------- what to do, in one order --------'
                     |
                     '---> data thread: fuses, reduces and hands out what was agreed

Horovod matches tensors by name and lets every rank submit them in an order of its own; torch.distributed matches by
call order. So every named operation is announced to the coordinator, and it starts when every rank has announced it,
in the order in which the coordinator says so. Small host tensors travel with the announcement and come back with the
answer.
"""
